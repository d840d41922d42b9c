"""Puts an out-of-range token index into a list of tokens."""

from __future__ import annotations

import random

from g4debug.faults import lists

# Far beyond any pool: on a GPU the address must not fall into a neighbouring allocation.
FAR = 640_000_000


def out_of_range(of: lists.Lists, it: lists.TokenList, draw: random.Random) -> lists.Change | None:
    return lists.put(it, it.end - 1, FAR + draw.randrange(1000))


FAULT, install = lists.declare(
    "token-oob",
    "the last entry of a list of tokens gets an out-of-range index",
    out_of_range,
    watched="page-table",
)
