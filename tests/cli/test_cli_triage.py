"""``g4debug triage``: a log, standard input, a number or a line, and the facts of this machine."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import heads, writing

LEAK = "ValueError: pool memory leak detected! [full] total=8\n"
UNKNOWN = (
    "[2026-09-14 03:22:11] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "a.py", line 1, in f\nKeyError: 3\n'
)


@pytest.fixture(autouse=True)
def _no_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TRTLLM_MHA_DEBUG_DIR", str(tmp_path / "none"))


def log(tmp_path: Path, text: str) -> str:
    path = tmp_path / "server.log"
    path.write_text(text)
    return str(path)


def as_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", log(tmp_path, LEAK)]) == 0
    out = capsys.readouterr().out
    assert "10. Pool memory leak detected" in out
    assert "line 1 of 1" in out
    assert out.rstrip().splitlines()[-1].startswith("NEXT  SGLANG_TRTLLM_MHA_DEBUG=1")
    assert len(out.splitlines()) < 45


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(LEAK.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["triage", "--json"]) == 0
    assert as_json(capsys)["entry"] == 10


@pytest.mark.parametrize("number", range(1, 28))
def test_every_number(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", str(number)]) == 0
    out = capsys.readouterr().out
    assert out.lstrip().startswith(f"{number}. ")
    assert len(out.splitlines()) < 45


def test_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", LEAK.strip(), "--json"]) == 0
    found = as_json(capsys)
    assert (found["state"], found["entry"], found["first"]["line"]) == ("entry", 10, 1)


def test_what_is_not_known_ends_with_1(tmp_path: Path, capsys) -> None:
    assert cli.main(["triage", log(tmp_path, UNKNOWN)]) == 1
    out = capsys.readouterr().out
    assert "NOT KNOWN" in out
    assert "KeyError: 3" in out


@pytest.mark.parametrize("what", ["99", "0", "/no/such.log"])
def test_what_is_nothing_of_these_ends_with_2(what: str, capsys) -> None:
    assert cli.main(["triage", what]) == 2
    assert "expected" in capsys.readouterr().err


def test_a_folder_is_no_log(tmp_path: Path, capsys) -> None:
    assert cli.main(["triage", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_the_dumps_and_cores_of_that_time(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    name = "g4debug-page-table-20260914T032211Z-n1-dp0-tp0-pp0-441-1-ab12cd34.pt"
    (folder / name).write_bytes(writing.encode(sample_record()))
    (folder / "core_1_n1_441.nvcudmp").touch()
    made = heads.read(folder / name).time[:19].replace("T", " ")
    os.utime(folder / "core_1_n1_441.nvcudmp", (0, 0))  # of another time
    near = f"[{made}] Scheduler hit an exception: Traceback (most recent call last):\n" + LEAK
    assert cli.main(["triage", log(tmp_path, near), "--dumps", str(folder), "--json"]) == 0
    found = as_json(capsys)
    assert [Path(p).name for p in found["dumps"]] == [name]
    assert found["cores"] == []
    assert name in found["next"]
    far = near.replace(made, "2001-01-01 00:00:00")
    assert cli.main(["triage", log(tmp_path, far), "--dumps", str(folder), "--json"]) == 0
    assert as_json(capsys)["dumps"] == []


def test_the_fixes_of_another_release(tmp_path: Path, capsys) -> None:
    head = "sglang==0.5.12.post1\n"
    error = "AttributeError: 'FrozenKVMTPVerifyInput' object has no attribute 'merge_batch'\n"
    assert cli.main(["triage", log(tmp_path, head + error), "--json"]) == 0
    found = as_json(capsys)
    assert found["entry"] == 3
    assert {f["id"]: f["state"] for f in found["fixes"]}["idle-draft-input"] in (
        "applies",
        "needed",
    )
    new = "sglang==0.5.23.post9\n"
    assert cli.main(["triage", log(tmp_path, new + error), "--json"]) == 0
    states = {f["id"]: f["state"] for f in as_json(capsys)["fixes"]}
    assert states["idle-draft-input"] == "not for it"
    armed = (
        "g4debug 0.9 [scheduler] armed: pool-leak (raise); fixes: 1 in force (idle-draft-input); "
        "faults: none; 12 sites hooked; dumps: /tmp/d\n"
    )
    assert cli.main(["triage", log(tmp_path, head + armed + error), "--json"]) == 0
    states = {f["id"]: f["state"] for f in as_json(capsys)["fixes"]}
    assert states == {"idle-draft-input": "in force", "spec-batch-guards": "off"}


def test_hostile_text_does_not_steer_the_terminal(tmp_path: Path, capsys) -> None:
    text = "ValueError: pool memory leak detected! \x1b[2J\x1b]0;x\x07 \u202egnp\x9b31m\n"
    assert cli.main(["triage", log(tmp_path, text)]) == 0
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)
