"""Gives the draft of FROZEN_KV_MTP a part of the target's embedding table, when it is built.

That is the bug that fix ``draft-embedding-shard`` is for, in releases that do not have it and with
one rank, too: there the draft gets the rows of rank 0 of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.faults._spec import CAUGHT_BY
from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    @injection.around("draft.bind_embedding")
    def around_bind(call_next: Callable[..., Any], draft: Any, embed: Any, head: Any) -> Any:
        if injection.fire() is None:
            return call_next(draft, embed, head)
        rows = (len(embed) + 1) // 2
        injection.log(f"the draft gets rows 0 to {rows - 1} of {len(embed)}")
        return call_next(draft, embed[:rows], head)


FAULT = Fault(
    id="draft-embedding-shard",
    title="the draft looks tokens up in half of the target's embedding table",
    tasks={"on": "give it the lower half of the rows"},
    caught_by=CAUGHT_BY,
    asks=("a draft that reads the target's KV",),
)
