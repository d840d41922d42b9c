"""NGRAM: the host looks up what followed the same tokens before. There is no draft model.

The worker's forward verifies itself, and nothing extends a draft. One class is draft input and
verify input: as the former it has the tokens that the last verify accepted. Which token belongs to
which draft path is not known here, so of the tree only its first token is compared.
"""

from __future__ import annotations

from typing import Any

from g4debug.hooking.targets import CPU, H200
from g4debug.speculation.base import Adapter

NAME = "NGRAM"


def last_accepted(spec: Any) -> Any:
    """``accept_tokens`` are ``[requests * W]``, or ``[requests, W]`` where they are stashed."""
    tokens, lens = spec.accept_tokens, spec.accept_lens
    if tokens is None or lens is None:
        return None
    rows = tokens.reshape(lens.shape[0], -1)
    return rows.gather(1, (lens.long() - 1).clamp(min=0)[:, None])[:, 0]


ADAPTER = Adapter(
    name=NAME,
    runs=lambda algorithm: getattr(algorithm, "name", "") == NAME,
    prefix="Ngram",
    draft_writes_kv=None,
    overlap=True,
    sites={"forward": ("ngram.forward",), "draft": ("ngram.draft",)},
    ends={"scheduler.run_batch": lambda scheduler: True},
    run={"0.5.23": (CPU, H200)},
    releases=">=0.5.23",
    hidden=False,
    hands_hidden=False,
    seeds=False,
    fields=("accept_lens",),
    first=(),
    bonus=last_accepted,
    verifies=lambda spec: spec.draft_token is not None,
    depth=lambda worker: int(worker.draft_token_num),
    chains=False,
    replayed="",
)
