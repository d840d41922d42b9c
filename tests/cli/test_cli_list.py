"""``g4debug list``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing


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


def test_newest_first_one_line_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", str(folder), "--width", "80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 5 + 2
    hours = [line[11:13] for line in lines if "page-table" in line and "2026-06-01" in line]
    assert hours == ["03", "02", "01"]
    assert sum("BROKEN" in line for line in lines) == 2
    assert lines[-1].endswith("-4711-3.pt")
    assert all(len(line) <= 80 for line in lines[:-1])


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data) == 5
    assert set(data[0]) == {"path", "name", "time", "check", "headline", "size", "broken"}
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


def test_the_directory_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_TRTLLM_MHA_DEBUG_DIR", str(folder))
    assert cli.main(["list"]) == 0
    assert "page-table" in capsys.readouterr().out
