"""No file takes long or much memory to read, to refuse, or to list."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import effort
import pytest
from hostile_dumps import REPEATED, by_torch, honest, of_opcodes, slow
from record_strategies import same
from sample_kinds import KINDS
from sample_trap import sample_record

from g4debug.dumps import check, heads, reading, writing
from g4debug.dumps.errors import RefusedError
from g4debug.dumps.plain import to_plain
from g4debug.dumps.reading import Archive

pytestmark = pytest.mark.once("reading a dump does not import SGLang")

READER = Path(__file__).with_name("limited_reader.py")
MIB = 1 << 20
SLOW = sorted(slow(b"", MIB))[:: 1 if effort.long else 3]


class NoTensors:
    def size(self, key: str) -> int:
        return 0

    def tensor(self, *args: Any) -> None:
        return None


@pytest.mark.parametrize("name", sorted(REPEATED))
def test_the_work_for_a_pickle_is_bounded(name: str) -> None:
    """Counted: the opcodes that are walked. The file could have 16 million."""
    data = of_opcodes(REPEATED[name], check.MAX_PICKLE_BYTES - MIB)
    machine = check._Machine(data, NoTensors())
    pushed = 0

    class Stack(list[Any]):
        def append(self, item: Any) -> None:
            nonlocal pushed
            pushed += 1
            super().append(item)

    machine.stack = Stack()
    with contextlib.suppress(RefusedError):  # what is said is tested below
        machine.run()
    assert pushed <= check.MAX_OPCODES
    assert machine.room >= -(2 * MIB)  # the last text may be that large


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For each slow file of the largest size that is looked at: what limited_reader.py says."""
    folder = tmp_path_factory.mktemp("slow")
    good = writing.encode(sample_record())
    paths = []
    for name in SLOW:
        path = folder / f"{name}.pt"
        wide = name in ("many-records", "one-tensor", "zeros", "ends")
        size = heads.MAX_READ_BYTES if wide else check.MAX_PICKLE_BYTES
        path.write_bytes(slow(good, size - MIB)[name]())
        assert path.stat().st_size <= heads.MAX_READ_BYTES
        paths.append(str(path))
    done = subprocess.run(
        [sys.executable, str(READER), "200", *paths],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    return dict(zip(SLOW, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", SLOW)
def test_the_time_and_the_memory_for_a_file_are_bounded(
    measured: dict[str, dict[str, Any]], name: str
) -> None:
    """In a process that gets 200 MB.

    The issue's bound is 2 s. Alone on a core the slowest takes 1.3 s; here others run beside it.
    """
    said = measured[name]
    for command, megabytes in (("show", 200), ("list", 20)):
        assert said[command]["seconds"] < 6
        assert said[command]["megabytes"] < megabytes
        assert "\n" not in said[command]["error"]


def test_the_largest_honest_dump_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(honest(3 * MIB))
    assert len(reading.read(path).steps) > 20_000


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_torch_reads_and_what_we_read_is_the_same(tmp_path: Path, kind: str) -> None:
    """torch.load is the reference for the reader of check.py."""
    for number, record in enumerate((sample_record(), KINDS[kind]())):
        path = writing.write(writing.encode(record), tmp_path, f"{number}.pt")
        with heads.opened(path) as (file, size):
            archive = Archive(file, size)
            ours = check.build(archive.read("data.pkl"), reading._Tensors(archive), record.schema)
        assert same(ours, by_torch(path.read_bytes()))
        assert same(ours, to_plain(record))


def test_a_zip_with_many_records_is_refused_before_its_directory_is_read(tmp_path: Path) -> None:
    data = slow(b"", 8 * MIB)["many-records"]()
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    asked = []

    class Noted:
        def __init__(self, file: Any) -> None:
            self.file, self.seek, self.tell = file, file.seek, file.tell
            self.seekable = file.seekable

        def read(self, size: int = -1) -> bytes:
            asked.append(size)
            return bytes(self.file.read(size))

    with path.open("rb") as file, pytest.raises(RefusedError, match="directory is longer"):
        Archive(Noted(file), len(data))  # type: ignore[arg-type]
    assert all(0 <= size <= MIB for size in asked)
    assert sum(asked) < MIB
