"""Lets a request that ends hand its pages to the prefix cache under a key that is not its own.

Whoever begins with the tokens of that key reads KV that belongs to others. The key is changed
between its making and the insert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from g4debug.faults._prefix import FAMILIES
from g4debug.faults._spec import other_token
from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    def around_caching(
        call_next: Callable[..., Any], tree: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def insert(params: Any, *more: Any, **named: Any) -> Any:
            vars(tree).pop("insert", None)
            size = tree.page_size
            if len(params.key) >= size and (action := injection.fire()) is not None:
                params.key = key = copy.copy(params.key)
                at = len(key) // size * size - size
                if action.task == "token":
                    key.token_ids = key.token_ids[:]
                    key.token_ids[at] = other_token(key.token_ids[at])
                    what = f"token {at} of its key is another one"
                else:
                    key.extra_key = "g4debug"
                    what = "its key is in another namespace"
                injection.log(f"{action.task}: request {request.rid}: {what}")
            return tree.insert(params, *more, **named)

        if not request.finished() or getattr(tree, "disable", False):
            return call_next(tree, request, *args, **kwargs)
        # The class has the tracers' hook. It must see the key that SGLang is given.
        tree.insert = insert
        try:
            return call_next(tree, request, *args, **kwargs)
        finally:
            vars(tree).pop("insert", None)

    for family in FAMILIES:
        injection.around(f"tree.{family}.finished", optional=True)(around_caching)


FAULT = Fault(
    id="insert-other-key",
    title="a request hands its pages to the prefix cache as those of other tokens",
    tasks={
        "token": "a token of its key is another one",
        "namespace": "its key is in another namespace",
    },
    caught_by=("prefix-cache",),
    asks=("a prefix cache",),
    drills=("1*token", "1*namespace"),
)
