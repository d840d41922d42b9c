"""Files that a reader of dumps must refuse, and how: made from a good dump's bytes."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

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
    out = io.BytesIO()
    torch.save(payload, out)
    return out.getvalue()


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
    "hash-bomb": (lambda d: with_pickle(d, hash_bomb()), "more than 4000000 values"),
    "shared-bomb": (lambda d: with_pickle(d, shared_bomb()), "values"),
    "memo-bomb": (
        lambda d: with_pickle(d, b"\x80\x02}r\xff\xff\xff\xff."),
        "no schema|not a g4debug dump",
    ),
    "long-bomb": (
        lambda d: with_pickle(d, b"\x80\x02\x8b\xff\xff\xff\x7f."),
        "truncated or damaged",
    ),
    "zip": (lambda d: repack(d, lambda r: (r.clear(), r.update(a=b"b"))), "no data.pkl"),
}
