"""Puts the tokens of one pool into the list for the other: full ones into the window, or back.

Full-pool tokens in the window's list are what a missing translation leaves.
"""

from __future__ import annotations

import random

from g4debug.faults import lists


def pool_swap(of: lists.Lists, it: lists.TokenList, draw: random.Random) -> lists.Change | None:
    other = of.other(it)
    if other is None:
        return None
    count = min(len(it.entries), len(other.entries))
    if bool((it.entries[-count:] == other.entries[-count:]).all()):
        return None

    def do() -> str:
        it.indices[it.end - count : it.end] = other.entries[-count:].to(it.indices.dtype)
        return f"gets the last {count} tokens of the {other.name} list"

    return do


FAULT, install = lists.declare(
    "token-pool-swap",
    "a list of tokens gets the tokens of the other pool's list",
    pool_swap,
    asks=("a SWA pool",),
)
