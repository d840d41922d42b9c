"""Moves the end of one row's list of tokens by one, as a wrong ``kv_indptr`` does.

The row then reads an entry that is the next row's, or lies behind the list, and the next row
misses its first one.
"""

from __future__ import annotations

import random

from g4debug.faults import lists


def off_by_one(of: lists.Lists, it: lists.TokenList, draw: random.Random) -> lists.Change | None:
    def do() -> str:
        it.indptr[it.row + 1] = it.end + 1
        return f"ends at {it.end + 1} and not at {it.end}"

    return do


FAULT, install = lists.declare(
    "indptr-off-by-one",
    "kv_indptr ends one row's list one too late",
    off_by_one,
    watched="page-table",
)
