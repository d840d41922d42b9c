"""Dumps: whole or not at all on the way out, and nothing but a dump on the way in."""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path

import pytest
import torch
from hostile_dumps import HOSTILE
from record_strategies import same
from sample_trap import sample_record

from g4debug.dumps import errors, reading, writing
from g4debug.findings.record import TrapRecord

NAME = "g4debug-page-table-20260601T031415Z-4711-1.pt"


@pytest.fixture(scope="module")
def good() -> bytes:
    return writing.encode(sample_record())


def read_bytes(path: Path, data: bytes) -> TrapRecord:
    path.write_bytes(data)
    return reading.read(path)


# -- writing ---------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path, good: bytes) -> None:
    path = writing.write(good, tmp_path / "new" / "folder", NAME)
    assert same(reading.read(path), sample_record())
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
    with pytest.raises(errors.DumpError, match="No space left on device") as e:
        writing.write(good, tmp_path, NAME)
    assert "\n" not in str(e.value)
    assert os.listdir(tmp_path) == []


def test_an_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        writing.write(good, tmp_path, NAME)
    assert os.listdir(tmp_path) == []


def test_an_older_dump_survives_a_failed_write(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = writing.write(good, tmp_path, NAME)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(errors.DumpError):
        writing.write(b"half", tmp_path, NAME)
    assert path.read_bytes() == good


def test_a_directory_that_cannot_be_made(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(errors.DumpError) as e:
        writing.write(good, tmp_path / "file" / "dumps", NAME)
    assert "\n" not in str(e.value)


def test_a_directory_without_permission(nobody, good: bytes) -> None:
    folder, run = nobody
    assert run(lambda: writing.write(good, folder, NAME)) == str(folder / NAME)
    folder.chmod(0o500)
    said = run(lambda: writing.write(good, folder, NAME))
    assert said == f"DumpError: cannot write {folder / NAME}: Permission denied"


def test_a_record_that_no_reader_would_take_is_not_written() -> None:
    import dataclasses

    record = dataclasses.replace(sample_record(), geometry={"layers": object()})
    with pytest.raises(ValueError, match="geometry"):
        writing.encode(record)


# -- reading: one hostile file each ------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_file(
    tmp_path: Path, good: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = HOSTILE[name]
    data = make(good)
    monkeypatch.chdir(tmp_path)
    start = time.process_time()  # a busy machine is slow, but takes no more of it
    with pytest.raises(errors.DumpError, match=message) as e:
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
        with pytest.raises(errors.DumpError, match=message):
            reading.read(path)


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "x.pt").open("wb") as f:
        f.truncate(1 << 40)  # sparse
    with pytest.raises(errors.DumpError, match="no dump is that large"):
        reading.read(tmp_path / "x.pt")
