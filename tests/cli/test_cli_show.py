"""``g4debug show``, as a process: what it prints, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hostile_dumps import HOSTILE
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing
from g4debug.findings.record import SCHEMA

pytestmark = pytest.mark.once("commands do not import SGLang")


def show(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "g4debug", "show", *map(str, args)]
    return subprocess.run(
        command,
        capture_output=True,
        timeout=300,
        encoding="utf-8",
        cwd=env.pop("cwd", None),
        env=os.environ | {"PYTHONIOENCODING": "utf-8"} | env,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return writing.write(writing.encode(sample_record()), tmp_path, "x.pt")


def refused(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("g4debug: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr


def test_plain_when_piped(path: Path) -> None:
    done = show(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("g4debug: page-table")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
    assert done.stderr == ""


def test_the_order_of_the_report(path: Path) -> None:
    out = show(path).stdout
    labels = ["g4debug:", "WHERE", "EXPECTED", "GOT", "PAGE TABLE", "OWNER", "HISTORY"]
    labels += ["LAST STEPS", "VERSIONS", "POOLS", "FIXES", "TRACERS", "CAUSE", "FIX ", "NEXT"]
    at = [out.index(f"\n{label}") if i else 0 for i, label in enumerate(labels)]
    assert at == sorted(at)


def test_ascii_stream(path: Path) -> None:
    done = show(path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert ">57<" in done.stdout


def test_width_rows_all(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def out(*args: str) -> str:
        assert cli.main(["show", str(path), *args]) == 0
        return capsys.readouterr().out

    assert max(map(len, out("--width", "60").splitlines()[:-1])) <= 60
    assert "more rows below" in out("--rows", "3")
    assert "earlier steps" not in out("--all")
    for wrong in (("--width", "5"), ("--rows", "-3"), ("--rows", "many")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["show", str(path), *wrong])
        assert "expected a whole number, at least" in capsys.readouterr().err


def test_options_may_stand_between_the_files(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", str(path), "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["members"]
    for odd in ("-odd.pt", "x.pt"):  # what follows -- is a name, whatever it looks like
        assert cli.main(["show", "--", odd]) == 2
        assert f"{odd}: no such file" in capsys.readouterr().err


def test_a_file_that_is_cut_says_what_to_do_next(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.pt"
    cut.write_bytes(path.read_bytes()[:-100])
    assert cli.main(["show", str(cut)]) == 2
    assert capsys.readouterr().err.endswith(f"g4debug list {tmp_path}\n")


def test_json_is_the_whole_record(path: Path) -> None:
    done = show(path, "--json")
    data = json.loads(done.stdout)
    assert data["finding"]["location"]["layer"] == 4
    assert data["table"]["bad"] == [[3, 8, 57]]
    assert data["kind"] == "g4debug-dump"
    assert data["schema"] == SCHEMA


def test_svg(path: Path, tmp_path: Path) -> None:
    done = show(path, "--svg", tmp_path / "out.svg")
    assert done.returncode == 0
    assert ET.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")
    refused_svg = show(path, "--svg", tmp_path / "no" / "out.svg")
    assert refused_svg.returncode == 2
    assert refused_svg.stderr.count("\n") == 1


# All of them are read in process by test_dump; these are the ones with an answer of their own.
HERE = ["empty", "text", "cut", "pickle", "torch-code", "dump-code", "newer", "checkpoint"]
HERE += ["other-dict", "wrong-field", "short-storage", "stride-zero", "hash-bomb"]


@pytest.mark.parametrize("name", HERE)
def test_hostile_file(tmp_path: Path, name: str) -> None:
    good = writing.encode(sample_record())
    (tmp_path / "x.pt").write_bytes(HOSTILE[name][0](good))
    done = show("x.pt", cwd=str(tmp_path))
    refused(done)
    assert os.listdir(tmp_path) == ["x.pt"], "something in the file was executed"


def test_missing_directory_and_odd_names(tmp_path: Path) -> None:
    for odd in (tmp_path / "none.pt", tmp_path, "new\nline\x1b[31m"):
        refused(show(odd))


def test_escape_sequences_of_a_stranger_do_not_reach_the_terminal(tmp_path: Path) -> None:
    import dataclasses

    record = sample_record()
    evil = "\x1b]0;owned\x07\r\n\u202erid\udc80"
    finding = dataclasses.replace(
        record.finding, headline=f"g4debug: {evil}", owner=evil, history=(evil,), next_command=evil
    )
    assert record.table is not None
    table = dataclasses.replace(record.table, rids=(evil,) * 8)
    record = dataclasses.replace(record, finding=finding, table=table, versions={evil: evil})
    path = writing.write(writing.encode(record), tmp_path, "x.pt")
    done = show(path)
    assert done.returncode == 0, done.stderr
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(done.stdout)
    assert show(path, "--svg", tmp_path / "out.svg").returncode == 0
    ET.parse(tmp_path / "out.svg")


def test_a_large_table_is_fast_and_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import dataclasses

    record = sample_record()
    assert record.table is not None
    table = dataclasses.replace(
        record.table,
        values=np.full((256, 2048), 7),
        seq_lens=np.full((256,), 2048 * 64),
        first_live=np.zeros(256, dtype=np.int64),
        bad=np.array([[200, 1000, 57]]),
        rids=(),
        rows_total=256,
        columns_total=2048,
    )
    path = writing.write(writing.encode(dataclasses.replace(record, table=table)), tmp_path, "x.pt")
    start = time.process_time()  # a busy machine is slow, but takes no more of it
    assert cli.main(["show", str(path), "--width", "80"]) == 0
    assert time.process_time() - start < 20  # cell by cell it would take minutes
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 90
    assert "▶57◀" in out or ">57<" in out
