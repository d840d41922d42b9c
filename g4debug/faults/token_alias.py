"""Puts another request's token into a list of tokens: both then read the same KV."""

from __future__ import annotations

import random

from g4debug.faults import lists


def alias(of: lists.Lists, it: lists.TokenList, draw: random.Random) -> lists.Change | None:
    others = [x.last for x in of.every if x.name == it.name and x.row != it.row]
    others = [token for token in others if token != it.last]
    return lists.put(it, it.end - 1, draw.choice(others)) if others else None


FAULT, install = lists.declare(
    "token-alias", "the last entry of a list of tokens gets another request's token", alias
)
