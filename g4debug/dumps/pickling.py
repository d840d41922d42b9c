"""Pickles the values of a dump as ``torch.save`` does, without torch.

So the commands that write a dump on a laptop do not need torch, and ``torch.load`` and every
g4debug since 0.1 read what they write. The format is described by Python's ``pickletools`` and by
what ``torch.save`` writes: a tensor is a call of ``torch._utils._rebuild_tensor_v2`` with a
storage, and that is a persistent id, which names the record of the zip with the elements.
"""

from __future__ import annotations

import math
import pickle
import secrets
import struct
from typing import Any

import numpy as np

from g4debug.dumps.check import HOOKS, LONGS, REBUILD

PROTOCOL = 2  # torch.save's


def pickled(values: dict[str, Any]) -> tuple[bytes, list[bytes]]:
    """``values`` as the content of ``data.pkl``, and the content of the records ``data/0``, ….

    values: plain values and int64 arrays, in mappings and lists. Python's pickler, which is fast,
    gets a text that occurs nowhere else in place of each array; then the opcode for this text is
    exchanged for the opcodes of a tensor.
    """
    secret = secrets.token_hex(16)
    arrays: list[np.ndarray[Any, Any]] = []
    data = pickle.dumps(_without_arrays(values, secret, arrays), PROTOCOL)
    parts = []
    for number, array in enumerate(arrays):
        before, found, data = data.partition(_text(_place(secret, number)))
        assert found
        parts += [before, _tensor(str(number), array.shape)]
    return b"".join((*parts, data)), [array.astype("<i8").tobytes() for array in arrays]


def _without_arrays(value: Any, secret: str, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, dict):
        return {k: _without_arrays(v, secret, arrays) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_arrays(v, secret, arrays) for v in value]
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return _place(secret, len(arrays) - 1)
    return value


def _place(secret: str, number: int) -> str:
    return f"{secret}-{number}"


def _tensor(key: str, shape: tuple[int, ...]) -> bytes:
    """A tensor in C order over the whole record ``data/key``."""
    strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return _call(key, math.prod(shape), 0, shape, strides)


def _call(
    key: str, count: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> bytes:
    """count: the elements of the record. offset, strides: in elements."""
    stored = _several(_text("storage"), _global(LONGS), _text(key), _text("cpu"), _number(count))
    return b"".join(
        (
            _global(REBUILD),
            _several(
                stored + pickle.BINPERSID,
                _number(offset),
                _several(*map(_number, shape)),
                _several(*map(_number, strides)),
                pickle.NEWFALSE,
                _global(HOOKS) + pickle.EMPTY_TUPLE + pickle.REDUCE,
            ),
            pickle.REDUCE,
        )
    )


def _several(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _global(name: bytes) -> bytes:
    return pickle.GLOBAL + name + b"\n"


def _text(text: str) -> bytes:
    data = text.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _number(number: int) -> bytes:
    return pickle.dumps(number, PROTOCOL)[len(pickle.PROTO) + 1 : -len(pickle.STOP)]
