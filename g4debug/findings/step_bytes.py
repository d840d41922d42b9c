"""A step of the scheduler as bytes, which are kept for dumps and lie in the black box.

They are packed once, when the step begins. Whoever reads them makes a Step of them. First comes a
head, then four 4-byte integers for each request (row, committed, allocated and evicted tokens, -1
for each that is not known), then ``seq_lens`` in the same way.

The requests' ids are kept beside them. This module imports neither torch nor sglang.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from g4debug.hooking import req_kv

# Step, tokens in use of the full and of the SWA pool, Unix time in ns, waiting requests, how many
# requests and how many lengths there are, names of the forward mode and of the type of spec_info.
_HEAD = struct.Struct("<qqqqiII24s48s")
_FIELDS = len(req_kv.OF_STEP)
_MOST = (1 << 31) - 1


def size(requests: int) -> int:
    """Bytes of a step of so many requests, if each has a length."""
    return _HEAD.size + 4 * (_FIELDS + 1) * requests


def pack(
    requests: Sequence[Any],
    lengths: Sequence[int],
    step: int,
    used: Sequence[int],
    at: int,
    waiting: int,
    mode: str,
    spec: str,
) -> bytes:
    """used: tokens of the full and of the SWA pool, as many of them as there are."""
    full, swa = used if len(used) == 2 else (*used, -1, -1)[:2]
    count, known = len(requests), len(lengths)
    pack = _layout(count, known).pack
    head = (step, full, swa, at, waiting, count, known, _name(mode), _name(spec))
    try:
        return pack(*head, *req_kv.of_step(requests), *lengths)
    except (AttributeError, struct.error):  # a request does not say one of them
        columns = (map(_known, column) for column in req_kv.columns(requests))
        return pack(*head, *chain.from_iterable(zip(*columns, strict=True)), *lengths)


def shortened(packed: bytes, most: int) -> bytes:
    """A step with at most so many requests and lengths. The head keeps their number."""
    count, known = _HEAD.unpack_from(packed)[5:7]
    if max(count, known) <= most:
        return packed
    requests, lengths = _HEAD.size, _HEAD.size + 4 * _FIELDS * count
    return (
        packed[: requests + 4 * _FIELDS * min(count, most)]
        + packed[lengths : lengths + 4 * min(known, most)]
    )


def unpack(packed: bytes, rids: Sequence[str], most: int = _MOST) -> dict[str, Any]:
    """The fields of a Step, as plain values, and ``count``: how many requests it had.

    The bytes may be anything. most: as of :func:`shortened`.
    """
    step, full, swa, at, waiting, count, known, mode, spec = _HEAD.unpack_from(packed)
    kept = min(count, most)
    numbers = array("i")
    end = _HEAD.size + 4 * (_FIELDS * kept + min(known, most))
    numbers.frombytes(packed[_HEAD.size : end])
    requests, lengths = numbers[: _FIELDS * kept], numbers[_FIELDS * kept :]
    rows, committed, allocated, evicted = (requests[n::_FIELDS].tolist() for n in range(_FIELDS))
    return {
        "step": step,
        "forward_mode": _text(mode),
        "rids": [*rids, *[""] * kept][:kept],
        "seq_lens": lengths.tolist(),
        "spec_info": _text(spec),
        "full_used": full,
        "swa_used": swa,
        "time_ns": at,
        "waiting": waiting,
        "rows": rows,
        # [] if the requests of this SGLang do not have it.
        "committed": [] if -1 in committed else committed,
        "allocated": [max(0, n) for n in allocated],
        "evicted": [] if -1 in evicted else evicted,
        "count": count,
    }


@lru_cache(1024)
def _layout(requests: int, lengths: int) -> struct.Struct:
    return struct.Struct(f"{_HEAD.format}{_FIELDS * requests + lengths}i")


@lru_cache(1024)
def _name(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "ignore")


def _known(value: Any) -> int:
    return -1 if value is None else min(max(int(value), -1), _MOST)
