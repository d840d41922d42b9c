"""Content of black boxes: a step's fields, and bytes that are no box any more."""

from __future__ import annotations

import random
from types import SimpleNamespace

from g4debug.findings import black_box, step_bytes
from g4debug.findings.black_box import TOTAL_BYTES
from g4debug.hooking import req_kv


def step(n: int, rids=("a", "b"), lengths=(10, 11), **changes):
    """The ids and the bytes of a step. changes: columns."""
    columns = {"rows": [3, 4], "committed": [5, 6], "allocated": [7, 8], "evicted": [0, 1]}
    columns |= changes
    requests = [
        SimpleNamespace(**dict(zip(req_kv.OF_STEP, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]
    packed = step_bytes.pack(requests, lengths, n, [50, 60], 10**18 + n, 2, "DECODE", "Draft")
    return list(rids), packed


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
