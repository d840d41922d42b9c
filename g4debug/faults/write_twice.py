"""Writes the KV of two tokens of one forward to one place."""

from __future__ import annotations

from g4debug.faults import locations
from g4debug.faults.base import Injection


def spoil(forward: locations.Forward, injection: Injection) -> tuple[int, int, str]:
    token, other = injection.random.sample(forward.tokens, 2)
    at = f"as token {other.position} of row {other.row} is"
    return token.index, int(forward.loc[other.index]), at


FAULT, install = locations.declare(
    "write-twice",
    "the KV of two tokens of a forward is written to one place",
    lambda forward: len(forward.tokens) > 1,
    spoil,
    ("1*on@mode=extend", "20*on@mode=target_verify"),
)
