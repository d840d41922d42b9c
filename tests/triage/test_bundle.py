"""The bundle has the server's own words, and neither prompts nor secrets."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import heads, writing
from g4debug.triage import bundle

NAME = "g4debug-page-table-20260914T032211Z-n1-dp0-tp0-pp0-441-1-ab12cd34.pt"


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / NAME).write_bytes(writing.encode(sample_record()))
    return tmp_path / "dumps"


@pytest.fixture
def log(tmp_path: Path, dumps: Path) -> Path:
    made = heads.read(dumps / NAME).time[:19].replace("T", " ")
    path = tmp_path / "server.log"
    path.write_text(
        f"[{made}] server_args=ServerArgs(model_path='acme/oak', api_key='hunter2', "
        'admin_api_key="hunter3", token=None)\n'
        f"[{made}] Receive: obj=GenerateReqInput(text='the secret plan of Carol')\n"
        "the secret plan goes on in a second line\n"
        f"[{made}] downloading with hf_abcdefghijklmnopqrstuv\n"
        f"[{made}] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n'
        "ValueError: pool memory leak detected! [full] total=8\n"
    )
    return path


def files(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        return {
            m.name.removeprefix("g4debug-bundle/"): tar.extractfile(m)
            .read()
            .decode("utf-8", "replace")
            for m in tar
        }


def test_it_has_what_a_report_needs_and_no_prompt(log: Path, dumps: Path, tmp_path: Path, capsys):
    out = tmp_path / "out.tar"
    args = ["triage", str(log), "--dumps", str(dumps), "--bundle", str(out), "--yes"]
    assert cli.main(args) == 0
    found = files(out)
    assert set(found) >= {"triage.json", "versions.txt", "log.txt", "heads.json"}
    assert NAME not in found
    everything = "\n".join(found.values())
    for word in ("hunter", "Carol", "secret plan", "hf_abc"):
        assert word not in everything
    assert "pool memory leak detected!" in found["log.txt"]
    assert found["log.txt"].count(bundle.LEFT_OUT) == 1
    assert "token=None" in found["log.txt"]
    assert NAME in found["heads.json"]
    assert out.stat().st_mode & 0o777 == 0o600
    told = capsys.readouterr().err
    assert all(name in told for name in found)
    assert cli.main(args) == 2  # it is not overwritten
    assert "exists" in capsys.readouterr().err


def test_the_tape_is_in_it_only_if_asked_for(log: Path, dumps: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.tar"
    args = ["triage", str(log), "--dumps", str(dumps), "--bundle", str(out), "--yes", "--tape"]
    assert cli.main(args) == 0
    assert NAME in files(out)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "written"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_it_asks_first(answer, written, log, dumps, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    out = tmp_path / "out.tar"
    assert cli.main(["triage", str(log), "--dumps", str(dumps), "--bundle", str(out)]) == 0
    assert out.exists() is written
    assert not list(tmp_path.glob(".g4debug-*"))


def test_where_nobody_can_be_asked_nothing_is_written(log, dumps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    out = tmp_path / "out.tar"
    assert cli.main(["triage", str(log), "--dumps", str(dumps), "--bundle", str(out)]) == 2
    assert "--yes" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "args",
    [["8", "--bundle", "x.tar"], ["-", "--bundle", "x.tar"], ["8", "--yes"], ["8", "--tape"]],
)
def test_a_call_that_makes_no_bundle(args, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["triage", *args]) == 2
    assert "--bundle" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    ["api_key='abc123'", "--api-key abc123", "Authorization: Bearer abc123", "hf_token=abc123",
     "OPENAI_API_KEY=abc123", '"password": "abc123"', "AWS_SECRET_ACCESS_KEY=abc123"],
)  # fmt: skip
def test_what_looks_like_a_secret_is_masked(text: str) -> None:
    assert "abc123" not in bundle.masked(text)


@pytest.mark.parametrize(
    "text", ["max_total_tokens=4096", "#token: 40", "api_key=None", "new_token_ratio: 0.7"]
)
def test_what_is_none_stays(text: str) -> None:
    assert bundle.masked(text) == text
