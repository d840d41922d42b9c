"""``g4debug list``."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing
from g4debug.findings import black_box


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for hour in (1, 3, 2):
        record = dataclasses.replace(sample_record(), created=f"2026-06-01T0{hour}:00:00+00:00")
        name = f"g4debug-page-table-20260601T0{hour}0000Z-4711-{hour}.pt"
        writing.write(writing.encode(record), tmp_path, name)
    (tmp_path / "cut.pt").write_bytes(writing.encode(sample_record())[:999])
    (tmp_path / "notes.txt").write_text("not a dump")
    (tmp_path / ".g4debug-x.tmp").write_text("being written")
    (tmp_path / "gone.pt").symlink_to(tmp_path / "nowhere")
    return tmp_path


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if g4debug were on PATH."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")


def dumped(folder: Path, name: str, time: str, launch: str, **location: object) -> Path:
    record = sample_record()
    where = dataclasses.replace(record.finding.location, **location)
    finding = dataclasses.replace(record.finding, location=where)
    created = f"2026-06-01T{time}+00:00"
    record = dataclasses.replace(record, finding=finding, created=created, launch=launch)
    return writing.write(writing.encode(record), folder, name)


def test_newest_first_with_whole_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", str(folder), "--width", "80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    hours = [line[11:13] for line in lines if "page-table" in line and line[:4] == "2026"]
    assert hours[-3:] == ["03", "02", "01"]
    assert sum("BROKEN" in line for line in lines) == 2
    for name in os.listdir(folder):
        assert (f"  {name}" in lines) is (name.endswith(".pt") and name[0] != ".")
    # cut.pt is newer, but cannot be shown.
    newest = folder / "g4debug-page-table-20260601T030000Z-4711-3.pt"
    assert lines[-1] == f"NEXT  g4debug show {newest}"


def test_the_dumps_of_an_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumped(tmp_path, "late.pt", "03:00:02.5", "L", host="n1", rank=1, pid=8)
    dumped(tmp_path, "first one.pt", "03:00:00.1", "L", host="n2", rank=0, pid=7)
    dumped(tmp_path, "older.pt", "02:00:00", "K", host="n2", rank=0, pid=7)
    assert cli.main(["list", str(tmp_path), "--width", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2026-06-01 03:00:00  incident: 2 dumps of 2 processes on 2 hosts"
    assert lines[1].startswith("  first ")
    assert lines[1].endswith("n2, TP 0, pid 7, step 118")
    assert lines[3] == "  'first one.pt'"
    assert lines[4].startswith("  +2.400 s ")
    assert lines[6] == "  late.pt"
    command = f"g4debug show '{tmp_path}/first one.pt' {tmp_path}/late.pt"
    assert lines[7] == f"  show: {command}"
    assert lines[-1] == f"NEXT  {command}"


def test_an_incident_of_many_dumps_is_shown_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(9):
        dumped(tmp_path, f"{rank}.pt", "03:00:00", "L", rank=rank, pid=rank)
    assert cli.main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"NEXT  g4debug show {tmp_path}\n")


EVIL = ["g4debug-$(touch X)-1-1.pt", "two words.pt", "\x1b[2Jred.pt", "-x.pt", "a'b.pt"]


@pytest.mark.parametrize("name", EVIL)
def test_names_of_a_stranger_are_quoted_in_every_command(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What NEXT says is run by a shell, and shows the dump; nothing else happens."""
    record = sample_record()
    finding = dataclasses.replace(record.finding, next_command="")
    writing.write(writing.encode(dataclasses.replace(record, finding=finding)), tmp_path, name)
    monkeypatch.chdir(tmp_path)
    said = []
    for args in (["list", "."], ["show", f"./{name}"], ["report", f"./{name}"]):
        assert cli.main(args) == 0
        said.append(capsys.readouterr().out)
    assert cli.main(["diff", f"./{name}", f"./{name}"]) == 0
    said.append(capsys.readouterr().out)
    for out in said:
        assert out.replace("\n", "").isprintable()
        assert name.isprintable() or name not in out
    commands = [out.rpartition("NEXT")[2].strip() for out in said[:2]]
    for command in commands:
        script = f'g4debug() {{ printf %s "${{@: -1}}"; }}; {command}'
        done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
        assert Path(os.fsdecode(done.stdout)) == Path(name)
    (html,) = shlex.split(said[2]) if name.isprintable() else [str(Path(name).with_suffix(".html"))]
    assert Path(html).is_file()
    assert sorted(os.listdir()) == sorted([name, str(Path(name).with_suffix(".html"))])


def test_how_g4debug_is_called_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    script = tmp_path / "two words" / "g4debug"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script), "list"])
    assert cli.program() == f"'{script}'"
    (tmp_path / "g4debug").mkdir()  # `python g4debug list`, the package's folder
    for other in ("/x/g4debug/__main__.py", str(tmp_path / "g4debug")):
        monkeypatch.setattr(sys, "argv", [other, "list"])
        python = tmp_path / "venv" / "bin" / "python"  # with no script of ours beside it
        monkeypatch.setattr(sys, "executable", str(python))
        assert cli.program() == f"{python} -m g4debug"
    # A server in an environment that nobody activated: argv[0] is SGLang's.
    beside = python.with_name("g4debug")
    beside.parent.mkdir(parents=True)
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    assert cli.program() == str(beside)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert cli.program() == "g4debug"


def test_only_heads_are_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither torch nor more than the beginning of a file: 10,000 dumps take seconds."""
    code = (
        "import sys; from g4debug import cli; "
        f"status = cli.main(['list', {str(folder)!r}]); print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n0 False\n")


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data) == 5
    assert {"path", "name", "time", "check", "headline", "size", "broken"} < set(data[0])
    assert {"host", "rank", "dp_rank", "pp_rank", "pid", "step", "launch"} < set(data[0])
    assert {e["incident"] for e in data} == {1, 2, 3, 4, 5}
    assert all(e["first"] for e in data)
    assert "zip directory" in next(e["broken"] for e in data if e["name"] == "cut.pt")


def test_empty_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", str(tmp_path)]) == 0
    assert "SGLANG_TRTLLM_MHA_DEBUG=1" in capsys.readouterr().out
    assert cli.main(["list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("name", ["none", "file"])
def test_no_directory(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["list", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_a_folder_that_no_server_has_made_yet_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_TRTLLM_MHA_DEBUG_DIR", str(tmp_path / "none"))
    assert cli.main(["list"]) == 0
    assert f"there is no folder {tmp_path / 'none'} yet" in capsys.readouterr().out
    assert cli.main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_directory_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_TRTLLM_MHA_DEBUG_DIR", str(folder))
    assert cli.main(["list"]) == 0
    assert "page-table" in capsys.readouterr().out


def test_black_boxes_of_other_users_are_told_where_there_is_no_dump(tmp_path, capsys, monkeypatch):
    for others, said in ((0, False), (2, True)):
        monkeypatch.setattr(black_box, "of_others", lambda n=others: n)
        assert cli.main(["list", str(tmp_path)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("has 2 black boxes of other users" in out) == said
