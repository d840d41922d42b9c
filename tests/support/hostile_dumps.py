"""Files that a reader of dumps must refuse, and how: made from a good dump's bytes."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sample_trap import sample_record

from g4debug.dumps.plain import to_plain
from g4debug.findings.record import SCHEMA


def repack(
    data: bytes, change: Callable[[dict[str, bytes]], None], compress: bool = False
) -> bytes:
    """The same archive with changed records and right checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {n: archive.read(n) for n in archive.namelist()}
    change(records)
    out = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", kind) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return out.getvalue()


def saved(payload: Any) -> bytes:
    """What torch.save makes of it, arrays as tensors."""
    out = io.BytesIO()
    torch.save(as_tensors(payload), out)
    return out.getvalue()


def as_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: as_tensors(v) for k, v in value.items()}
    if isinstance(value, list):
        return [as_tensors(v) for v in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def by_torch(data: bytes) -> Any:
    """What torch.load makes of an archive, tensors as arrays. The reference for our reader."""
    return as_arrays(torch.load(io.BytesIO(data), weights_only=True))


def as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: as_arrays(v) for k, v in value.items()}
    if isinstance(value, list):
        return [as_arrays(v) for v in value]
    return value.numpy() if isinstance(value, torch.Tensor) else value


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("pwned",))


def hash_bomb() -> bytes:
    """A key made of tuples of the same tuple: 2**60 steps to hash."""
    body = b"\x80\x02}K\x01q\x00"
    for i in range(60):
        body += b"h" + bytes([i]) + b"\x86q" + bytes([i + 1])
    return body + b"K\x01s."


def shared_bomb() -> bytes:
    """A million steps that share one list of a million texts, in 4 MB."""
    shared = ["x"] * 1_000_000
    step = {"step": 1, "forward_mode": "", "rids": shared, "seq_lens": []}
    return pickle.dumps({"kind": "g4debug-dump", "steps": [step] * 1_000_000}, protocol=2)


def with_pickle(data: bytes, pickled: bytes) -> bytes:
    return repack(data, lambda r: r.update({"archive/data.pkl": pickled}))


def huge(rows: int) -> bytes:
    """One stored element, claimed to be rows x rows by a stride of zero."""
    payload = to_plain(sample_record())
    payload["table"]["values"] = torch.zeros(1, dtype=torch.int64).as_strided((rows, rows), (0, 0))
    return saved(payload)


def of_opcodes(opcodes: bytes, size: int) -> bytes:
    """A pickle of about ``size`` bytes that repeats some opcodes inside a list."""
    return (
        b"\x80\x02}q\x00(X\x05\x00\x00\x00stepsq\x01](" + opcodes * (size // len(opcodes)) + b"eu."
    )


def many_records(size: int) -> bytes:
    """A zip with a directory that lists the same empty record again and again."""
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, *(0,) * 7, 1, *(0,) * 6) + b"a"
    count = size // len(entry)
    first = struct.pack("<4s5H3I2H", b"PK\3\4", 20, *(0,) * 7, 1, 0) + b"a"
    end = len(first), len(entry) * count
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 20, 20, 0, 0, count, count, end[1], end[0])
    there = struct.pack("<4sIQI", b"PK\6\7", 0, sum(end), 1)
    tail = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, end[1], end[0], 0)
    return first + entry * count + wide + there + tail


def many_views(data: bytes, size: int) -> bytes:
    """Steps that each hold the same large tensor."""
    payload = to_plain(sample_record())
    tensor = torch.zeros(size // 16, dtype=torch.int64)
    payload["steps"] = [tensor.view(1, -1) for _ in range(size // 200)]
    return saved(payload)


def honest(size: int) -> bytes:
    """A dump that is right in every field, and has so many steps that it has this size."""
    record = sample_record()
    steps = (dataclasses.replace(record.steps[-1], step=n) for n in range(size // 144))
    return saved(to_plain(dataclasses.replace(record, steps=tuple(steps))))


def one_long_list(size: int) -> bytes:
    payload = to_plain(sample_record())
    payload["steps"][0]["seq_lens"] = [7] * min(size // 2, 1_400_000)
    return saved(payload)


TEXT = b"X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20) + b"q\x02"
# Each made the reader slow or large, in proportion to its size: what to repeat in data.pkl.
REPEATED: dict[str, bytes] = {
    "nones": b"N",
    "small-numbers": b"K\x01",
    "numbers": b"J\xff\xff\xff\x7f",
    "floats": b"G" + b"\x3f" * 8,
    "long-numbers": b"\x8a\xff" + b"\x7f" * 255,
    "texts": b"X\x00\x00\x00\x00",
    "short-texts": b"X\x03\x00\x00\x00\xe2\x82\xac",
    "lists": b"]",
    "dicts": b"}",
    "full-dicts": b"}X\x01\x00\x00\x00aNs",
    "tuples": b")\x85",
    "marks": b"(",
    "nested-lists": b"](",
    "nested-tuples": b"\x85",
    "memo": b"q\x02",
    "wide-memo": b"r\xff\xff\xff\x7f",
    "growing-memo": b"".join(b"r" + struct.pack("<I", n) for n in range(2, 1 << 21)),
    "again": b"h\x01",
    "protos": b"\x80\x02",
    "globals": b"ccollections\nOrderedDict\n",
    "hooks": b"ccollections\nOrderedDict\n)R",
    "appends": b"]Na",
    "empty-appends": b"](e",
    "long-text-again": TEXT + b"h\x02" * (1 << 19),
    "wide-text": b"X" + struct.pack("<I", (1 << 20) + 4) + b"x" * (1 << 20) + "\U0001f600".encode(),
    "bad-text": b"X" + struct.pack("<I", 1 << 20) + b"\xff" * (1 << 20),
    "lines": b"S'" + b"\\" * 1000 + b"'\n",
    "digits": b"L" + b"9" * 4000 + b"L\n",
}


def slow(good: bytes, size: int) -> dict[str, Callable[[], bytes]]:
    """Files of about ``size`` bytes that take a careless reader long, or much memory."""
    files = {
        name: (lambda o=opcodes: with_pickle(good, of_opcodes(o, size)))
        for name, opcodes in REPEATED.items()
    }
    return files | {
        "many-records": lambda: many_records(size),
        "many-views": lambda: many_views(good, size),
        "honest": lambda: honest(size),
        "one-long-list": lambda: one_long_list(size),
        "one-tensor": lambda: saved(
            to_plain(sample_record()) | {"created": torch.zeros(size // 8, dtype=torch.int64)}
        ),
        "zeros": lambda: b"PK\3\4" + bytes(size - 4),
        "ends": lambda: b"PK\3\4" + b"PK\5\6" * (size // 4),
    }


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "empty file"),
    "text": (lambda d: b"hello\n", "not a torch file"),
    "cut": (lambda d: d[: len(d) // 2], "truncated"),
    "head": (lambda d: d[:4], "truncated"),
    "pickle": (lambda d: pickle.dumps(Bomb()), "nothing in it was executed"),
    "torch-code": (lambda d: saved(Bomb()), "refused: it holds pickled code"),
    "dump-code": (
        lambda d: saved(to_plain(sample_record()) | {"created": Bomb()}),
        "refused: it holds pickled code",
    ),
    "legacy": (
        lambda d: pickle.dumps({"kind": "g4debug-dump"}, protocol=2),
        "nothing in it was executed",
    ),
    "newer": (lambda d: saved({"kind": "g4debug-dump", "schema": 99}), "pip install -U g4debug"),
    "newer-in-all": (
        lambda d: saved({"table": torch.zeros(2), "kind": "g4debug-dump", "schema": SCHEMA + 1}),
        "pip install -U g4debug",
    ),
    "no-schema": (lambda d: saved({"kind": "g4debug-dump"}), "no schema number"),
    "checkpoint": (
        lambda d: saved(torch.nn.Linear(2, 2).state_dict()),
        "a torch file, but not a g4debug dump",
    ),
    "tensor": (lambda d: saved(torch.zeros(3)), "not a g4debug dump"),
    "list": (lambda d: saved([1, 2]), "not a g4debug dump"),
    "other-dict": (lambda d: saved({"a": "b"}), "not a g4debug dump"),
    "wrong-field": (
        lambda d: saved(to_plain(sample_record()) | {"created": 3}),
        "created: expected str, got int",
    ),
    "compressed": (lambda d: repack(d, lambda r: None, compress=True), "compressed"),
    "no-pickle": (lambda d: repack(d, lambda r: r.pop("archive/data.pkl")), "no data.pkl"),
    "short-storage": (
        lambda d: repack(d, lambda r: r.update({"archive/data/0": b"12345678"})),
        "claims 128 elements, but its data has 8 bytes",
    ),
    "stride-zero": (lambda d: huge(1 << 20), "1 stored elements"),
    "wrong-dtype": (
        lambda d: saved({"kind": "g4debug-dump", "table": torch.zeros(2)}),
        "not a g4debug dump",
    ),
    "hash-bomb": (lambda d: with_pickle(d, hash_bomb()), "used twice"),
    "shared-bomb": (lambda d: with_pickle(d, shared_bomb()), "used twice"),
    "memo-bomb": (
        lambda d: with_pickle(d, b"\x80\x02}r\xff\xff\xff\xff."),
        "memo is out of order",
    ),
    "long-bomb": (
        lambda d: with_pickle(d, b"\x80\x02\x8b\xff\xff\xff\x7f."),
        "truncated or damaged",
    ),
    "zip": (lambda d: repack(d, lambda r: (r.clear(), r.update(a=b"b"))), "no data.pkl"),
}
