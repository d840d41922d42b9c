"""Heads of dumps, read alone; and which dumps are of one incident."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hostile_dumps import HOSTILE, repack
from sample_trap import sample_record

from g4debug.dumps import heads, incidents, reading, writing
from g4debug.dumps.errors import DumpError
from g4debug.dumps.heads import Head
from g4debug.findings.record import TrapRecord

OLD = "g4debug-page-table-20260601T031415Z-4711-1.pt"


def record_at(time: str, launch: str = "L", **location: object) -> TrapRecord:
    record = sample_record()
    where = dataclasses.replace(record.finding.location, **location)
    finding = dataclasses.replace(record.finding, location=where)
    return dataclasses.replace(
        record, finding=finding, created=f"2026-06-01T{time}+00:00", launch=launch
    )


def dumped(folder: Path, name: str, record: TrapRecord) -> Path:
    return writing.write(writing.encode(record), folder, name)


def without_head(data: bytes) -> bytes:
    """As an older g4debug wrote it."""
    return repack(data, lambda r: r.pop("archive/head.json"))


def bytes_read() -> int:
    """How many bytes this process has read so far, from any file."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def with_head(data: bytes, head: object) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return repack(data, lambda r: r.update({"archive/head.json": text}))


# -- heads -----------------------------------------------------------------------------------


def test_the_head_is_the_record_in_short(tmp_path: Path) -> None:
    record = record_at("03:14:15.123", host="node7", dp_rank=1, pp_rank=0)
    path = dumped(tmp_path, "x.pt", record)
    assert heads.read(path) == Head(
        schema=record.schema,
        check="page-table",
        kind="out-of-range",
        headline=record.finding.headline,
        time="2026-06-01T03:14:15.123+00:00",
        process="scheduler",
        host="node7",
        pid=4711,
        rank=0,
        dp_rank=1,
        pp_rank=0,
        step=118,
        launch="L",
    )
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist()[0] == "archive/head.json"
    assert reading.read(path).launch == "L"


def test_only_the_beginning_and_the_end_of_a_file_are_read(tmp_path: Path) -> None:
    path = dumped(tmp_path, "x.pt", sample_record())
    data = bytearray(path.read_bytes())
    data[heads._BEGINNING :] = bytes(40 << 20) + data[-heads.END_BYTES :]
    path.write_bytes(data)
    read_before = bytes_read()
    assert heads.read(path).check == "page-table"
    assert bytes_read() - read_before < 64 << 10


def test_a_head_is_read_without_torch(tmp_path: Path) -> None:
    path = dumped(tmp_path, "x.pt", sample_record())
    code = (
        "import sys; from pathlib import Path; from g4debug.dumps import incidents; "
        f"print(incidents.look(Path({str(path)!r})).head.check, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "page-table False\n"


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_file_is_looked_at(tmp_path: Path, name: str) -> None:
    path = tmp_path / OLD
    path.write_bytes(HOSTILE[name][0](writing.encode(sample_record())))
    seen = incidents.look(path)
    assert seen.head.check == "page-table"  # by its name, or its head
    assert "\n" not in seen.broken


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"{", "head"),
        (b"[]", "no JSON object"),
        (b"[" * 11000, "nested too deeply|head"),
        (b"9" * 11000, "head|digits"),
        (b" " * (heads.MAX_HEAD_BYTES + 1), "too long"),
        ({"check": 3}, "no str as check"),
        ({"pid": "4711"}, "no int as pid"),
        ({"pid": True}, "no int as pid"),
        ({"pid": 1.5}, "no int as pid"),
    ],
)
def test_a_damaged_head(tmp_path: Path, head: object, reason: str) -> None:
    path = tmp_path / OLD
    path.write_bytes(with_head(writing.encode(sample_record()), head))
    with pytest.raises(DumpError, match=reason):
        heads.read(path)
    assert incidents.look(path).broken


def test_a_head_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / OLD
    values = {"headline": "\U0001f600" * 100, "check": "c" * 4000, "pid": 1 << 80, "time": "soon"}
    path.write_bytes(with_head(writing.encode(sample_record()), values | {"new": [1]}))
    head = heads.read(path)
    assert (len(head.check), head.time) == (heads.MAX_TEXT, "")
    assert head.pid == (1 << 63) - 1
    widest = Head(
        **{f.name: "\U0001f600" * 999 for f in dataclasses.fields(Head) if f.type == "str"}
    )
    cut = heads.from_values(dataclasses.asdict(widest))
    assert len(heads.encode(cut)) <= heads.MAX_HEAD_BYTES


def test_a_file_that_is_cut_off_is_broken_although_its_head_is_whole(tmp_path: Path) -> None:
    path = dumped(tmp_path, OLD, sample_record())
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 700, 20, 3, 0):
        path.write_bytes(whole[:length])
        assert incidents.look(path).broken, length
    path.write_bytes(whole)
    assert not incidents.look(path).broken


def test_the_checksum_of_a_head(tmp_path: Path) -> None:
    path = dumped(tmp_path, OLD, sample_record())
    path.write_bytes(path.read_bytes().replace(b'"page-table"', b'"PAGE-TABLE"', 1))
    with pytest.raises(DumpError, match="checksum"):
        heads.read(path)


# -- incidents -------------------------------------------------------------------------------


def names(found: list[incidents.Incident]) -> list[list[str]]:
    return [[dump.path.name for dump in incident.dumps] for incident in found]


def test_dumps_of_one_launch_within_seconds_are_one_incident(tmp_path: Path) -> None:
    for name, record in {
        "a2.pt": record_at("03:00:01.500", "A", host="n1", pid=7, rank=1),
        "a1.pt": record_at("03:00:01.200", "A", host="n2", pid=7, rank=0),
        "a3.pt": record_at("03:00:20", "A", host="n1", pid=9),
        "later.pt": record_at("03:05:00", "A", host="n1", pid=9),
        "b1.pt": record_at("03:00:01.300", "B", host="n1", pid=7),
    }.items():
        dumped(tmp_path, name, record)
    found = incidents.group(incidents.look_into(tmp_path))
    assert names(found) == [["later.pt"], ["b1.pt"], ["a1.pt", "a2.pt", "a3.pt"]]
    assert found[2].first.head.rank == 0
    assert found[2].hosts == ("n2", "n1")
    assert found[2].processes == 3


def test_at_the_same_time_the_earlier_step_was_first(tmp_path: Path) -> None:
    for name, step in (("a.pt", 12), ("b.pt", 9)):
        dumped(tmp_path, name, record_at("03:00:00", step=step))
    assert names(incidents.group(incidents.look_into(tmp_path))) == [["b.pt", "a.pt"]]


def test_without_a_launch_a_process_is_an_incident(tmp_path: Path) -> None:
    """Dumps of older versions name no launch, and have no head."""
    for name, pid in (("a", 1), ("b", 1), ("c", 2)):
        record = record_at(f"03:00:0{pid}", "", pid=pid)
        (tmp_path / f"{name}.pt").write_bytes(without_head(writing.encode(record)))
    (tmp_path / "cut.pt").write_bytes(writing.encode(record)[:500])
    found = names(incidents.group(incidents.look_into(tmp_path)))
    assert sorted(found) == [["a.pt", "b.pt"], ["c.pt"], ["cut.pt"]]


def test_an_older_dump_without_a_head_tells_by_its_first_values(tmp_path: Path) -> None:
    record = record_at("03:14:15", "", host="node7")
    (tmp_path / "x.pt").write_bytes(without_head(writing.encode(record)))
    head = heads.read(tmp_path / "x.pt")
    assert head == dataclasses.replace(heads.of(record), schema=-1)


def test_an_older_dump_whose_first_values_cannot_be_read_tells_by_its_name(tmp_path: Path) -> None:
    record = record_at("03:14:15")
    finding = dataclasses.replace(record.finding, history=("x" * heads.OLD_BEGINNING,))
    data = writing.encode(dataclasses.replace(record, finding=finding))
    (tmp_path / OLD).write_bytes(without_head(data))
    assert heads.read(tmp_path / OLD) == heads.from_name(OLD)
    assert reading.read(tmp_path / OLD).finding == finding


def test_what_is_no_dump_is_not_looked_at(tmp_path: Path) -> None:
    for name in (".g4debug-1-x.tmp", ".hidden.pt", "notes.txt", "x.html"):
        (tmp_path / name).write_text("x")
    (tmp_path / "gone.pt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo.pt")
    seen = {dump.path.name: dump for dump in incidents.look_into(tmp_path)}
    assert set(seen) == {"gone.pt", "fifo.pt"}
    assert seen["gone.pt"].broken.startswith("no such file")
    assert seen["gone.pt"].time == ""
    with pytest.raises(FileNotFoundError):
        incidents.look_into(tmp_path / "none")
