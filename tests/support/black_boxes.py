"""Content of black boxes: a step's fields, and bytes that are no box any more."""

from __future__ import annotations

import random

from g4debug.findings import black_box
from g4debug.findings.black_box import TOTAL_BYTES


def step(n: int, rids=("a", "b"), **changes):
    columns = {"rows": [3, 4], "committed": [5, 6], "allocated": [7, 8], "evicted": [0, 1]}
    columns |= changes
    return (n, "DECODE", list(rids), [10, 11], "Draft", [50, 60], 10**18 + n, 2, *columns.values())


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Garbage, hostile lengths and numbers, parts of other boxes, and files that are cut off."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 400)):
        at = rng.randrange(16, TOTAL_BYTES - 8)
        at = rng.choice((at, at // 8 * 8, black_box._STEPS_AT + at % 3 * black_box.STEP_BYTES))
        value = rng.choice((b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8), rng.randbytes(8)))
        out[at : at + 8] = value
    if rng.random() < 0.2:
        place = rng.randrange(TOTAL_BYTES // 2)
        out[place : place + TOTAL_BYTES // 3] = rng.randbytes(TOTAL_BYTES // 3)
    return bytes(out[:TOTAL_BYTES])
