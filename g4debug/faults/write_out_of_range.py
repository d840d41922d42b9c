"""Writes a token's KV behind the end of its pool."""

from __future__ import annotations

from g4debug.faults import locations
from g4debug.faults.base import Injection


def spoil(forward: locations.Forward, injection: Injection) -> tuple[int, int, str]:
    token = injection.random.choice(forward.tokens)
    # The first slot that is none. SGLang's mapping still has an entry for it, -1, which is where
    # the sliding layers then write.
    return token.index, forward.slots, f"but the full pool has {forward.slots} slots"


FAULT, install = locations.declare(
    "write-out-of-range",
    "a token's KV is written behind the end of the pool",
    lambda forward: bool(forward.tokens),
    spoil,
    ("1*on@mode=extend", "1*on@mode=target_verify"),
)
