"""Dumps: whole or not at all on the way out, and nothing but a dump on the way in."""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "reporters"))
from sample_trap import sample_record
from test_record import same

from g4debug import dump
from g4debug.plain import to_plain
from g4debug.record import SCHEMA, TrapRecord

NAME = "g4debug-page-table-20260601T031415Z-4711-1.pt"


@pytest.fixture(scope="module")
def good() -> bytes:
    return dump.encode(sample_record())


def read_bytes(path: Path, data: bytes) -> TrapRecord:
    path.write_bytes(data)
    return dump.read(path)


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


# -- writing ---------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path, good: bytes) -> None:
    path = dump.write(good, tmp_path / "new" / "folder", NAME)
    assert same(dump.read(path), sample_record())
    assert os.listdir(path.parent) == [NAME]


def test_torch_alone_opens_it(good: bytes) -> None:
    payload = torch.load(io.BytesIO(good), weights_only=True)
    assert payload["kind"] == "g4debug-dump"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(dump.DumpError, match="No space left on device") as e:
        dump.write(good, tmp_path, NAME)
    assert "\n" not in str(e.value)
    assert os.listdir(tmp_path) == []


def test_an_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dump.write(good, tmp_path, NAME)
    assert os.listdir(tmp_path) == []


def test_an_older_dump_survives_a_failed_write(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dump.write(good, tmp_path, NAME)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(dump.DumpError):
        dump.write(b"half", tmp_path, NAME)
    assert path.read_bytes() == good


def test_a_directory_that_cannot_be_made(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(dump.DumpError) as e:
        dump.write(good, tmp_path / "file" / "dumps", NAME)
    assert "\n" not in str(e.value)


def test_a_directory_without_permission(nobody, good: bytes) -> None:
    folder, run = nobody
    assert run(lambda: dump.write(good, folder, NAME)) == str(folder / NAME)
    folder.chmod(0o500)
    said = run(lambda: dump.write(good, folder, NAME))
    assert said == f"DumpError: cannot write {folder / NAME}: Permission denied"


def test_a_record_that_no_reader_would_take_is_not_written() -> None:
    import dataclasses

    record = dataclasses.replace(sample_record(), geometry={"layers": object()})
    with pytest.raises(ValueError, match="geometry"):
        dump.encode(record)


# -- reading: one hostile file each ------------------------------------------------------------


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
        "claims 128 elements, its data has 8 bytes",
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


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_file(
    tmp_path: Path, good: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = HOSTILE[name]
    data = make(good)
    monkeypatch.chdir(tmp_path)
    start = time.process_time()  # a busy machine is slow, but takes no more of it
    with pytest.raises(dump.DumpError, match=message) as e:
        read_bytes(tmp_path / "x.pt", data)
    assert "\n" not in str(e.value)
    assert time.process_time() - start < 20
    assert not (tmp_path / "pwned").exists()


def test_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.pt")
    for path, message in [
        (tmp_path / "none.pt", "no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / "fifo.pt", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (Path("a\0b"), "cannot be read"),
    ]:
        with pytest.raises(dump.DumpError, match=message):
            dump.read(path)


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "x.pt").open("wb") as f:
        f.truncate(1 << 40)  # sparse
    with pytest.raises(dump.DumpError, match="no dump is that large"):
        dump.read(tmp_path / "x.pt")
