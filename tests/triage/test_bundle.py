"""The bundle has the server's own words, and neither prompts nor secrets."""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
import pty
import subprocess
import sys
import tarfile
import termios
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.cli import triage
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
    assert set(found) >= {"triage.json", "versions.txt", "log.txt", "heads.json", "status.json"}
    assert json.loads(found["status.json"])["dumps"].keys() == {NAME}
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
    monkeypatch.setattr(triage, "TERMINAL", str(tmp_path / "none"))
    out = tmp_path / "out.tar"
    assert cli.main(["triage", str(log), "--dumps", str(dumps), "--bundle", str(out)]) == 2
    assert "--yes" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("answer", "foreground", "written"),
    [("y", True, True), ("n", True, False), ("y", False, False)],
)
def test_a_log_in_a_pipe_is_asked_about_on_the_terminal(
    answer, foreground, written, log, dumps, tmp_path
) -> None:
    """As ``kubectl logs POD | g4debug triage --bundle out.tar``; no job in the background asks."""
    out = tmp_path / "out.tar"
    main, terminal = pty.openpty()

    def sit_down() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-c", "import sys; from g4debug.cli import main; sys.exit(main())"]
    if not foreground:
        job = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:], process_group=0))"
        command = [sys.executable, "-c", job, *command]
    words = ["triage", "--dumps", str(dumps), "--bundle", str(out)]
    with log.open("rb") as stream, (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, *words],
            stdin=stream,
            stdout=said,
            stderr=said,
            preexec_fn=sit_down,
        )
        os.write(main, f"{answer}\n".encode())
        code = process.wait(120)
    os.close(main)
    os.close(terminal)
    text = (tmp_path / "said").read_text()
    assert out.exists() is written, text
    assert code == (0 if foreground else 2), text


@pytest.mark.parametrize(
    "args",
    [
        ["8", "--bundle", "x.tar"],
        ["some words", "--bundle", "x.tar"],
        ["8", "--yes"],
        ["8", "--tape"],
    ],
)
def test_a_call_that_makes_no_bundle(args, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["triage", *args]) == 2
    assert "--bundle" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    ["api_key='abc123'", "--api-key abc123", "Authorization: Bearer abc123", "hf_token=abc123",
     "my password is abc123",
     "OPENAI_API_KEY=abc123", '"password": "abc123"', "AWS_SECRET_ACCESS_KEY=abc123"],
)  # fmt: skip
def test_what_looks_like_a_secret_is_masked(text: str) -> None:
    assert "abc123" not in bundle.masked(text)


@pytest.mark.parametrize(
    "text", ["max_total_tokens=4096", "#token: 40", "api_key=None", "new_token_ratio: 0.7"]
)
def test_what_is_none_stays(text: str) -> None:
    assert bundle.masked(text) == text


CLIENTS = """[{made}] server_args=ServerArgs(model_path='acme/a-model-with-a-name', api_key='x')
[{made}] Invalid request: messages[0].content = "my password is hunter2, tell nobody"
{{"rid":"a","text":"secret story of Carol"}}
RuntimeError is what Carol wrote in her question
  File "/w/carol/diary.py", line 1, in <module>
    diary_of_carol = "hunter2"
[{made}] Scheduler hit an exception: Traceback (most recent call last):
  File "/w/sglang/srt/managers/scheduler.py", line 88, in x
    raise ValueError(carol)
ValueError: bad regex in request: 'Carol asks (what|who) she is'
[{made}] Cuda failure 700 'an illegal memory access was encountered'
"""


def test_what_a_client_wrote_is_left_out(dumps: Path, tmp_path: Path) -> None:
    made = heads.read(dumps / NAME).time[:19].replace("T", " ")
    path = tmp_path / "server.log"
    path.write_text(CLIENTS.format(made=made))
    out = tmp_path / "out.tar"
    cli.main(["triage", str(path), "--dumps", str(dumps), "--bundle", str(out), "--yes"])
    found = files(out)
    everything = "\n".join(found.values()).lower()
    for word in ("carol", "hunter2"):
        assert word not in everything
    for kept in ("acme/a-model-with-a-name", "managers/scheduler.py", "bad regex in request"):
        assert kept in found["log.txt"]
    assert "an illegal memory access was encountered" in found["log.txt"]


def test_a_pipe_can_be_bundled(log: Path, dumps: Path, tmp_path: Path, monkeypatch) -> None:
    """As ``kubectl logs POD --previous | g4debug triage - --bundle out.tar --yes``."""
    out = tmp_path / "out.tar"
    with log.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert cli.main(["triage", "--dumps", str(dumps), "--bundle", str(out), "--yes"]) == 0
    assert "pool memory leak detected!" in files(out)["log.txt"]


def test_a_log_of_gzip_is_unpacked(log: Path, dumps: Path, tmp_path: Path, capsys) -> None:
    packed = tmp_path / "server.log.1"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    out = tmp_path / "out.tar"
    args = ["triage", str(packed), "--dumps", str(dumps), "--json"]
    assert cli.main([*args, "--bundle", str(out), "--yes"]) == 0
    assert json.loads(capsys.readouterr().out)["entry"] == 10
    assert "pool memory leak detected!" in files(out)["log.txt"]
    packed.write_bytes(gzip.compress(log.read_bytes())[:-9])
    assert cli.main(args) == 2
    assert "damaged" in capsys.readouterr().err


def test_a_log_that_is_packed_otherwise_is_refused(tmp_path: Path, capsys) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    assert cli.main(["triage", str(path)]) == 2
    assert "zstdcat LOG | g4debug triage" in capsys.readouterr().err


def test_it_has_the_launch_however_long_the_log_is() -> None:
    """And no secrets of its addresses."""
    start = b"[2026-09-14 03:20:01] server_args={'dist_init_addr': 'http://me:hunter2@host:1'}\n"
    armed = b"g4debug 1.0 [scheduler] armed: page-table (raise); SGLang 0.5.23; fixes: none\n"
    key = b"[2026-09-14 03:20:02] AWS_ACCESS_KEY_ID=AKIAABCDEFGHIJKLMNOP x max_total_num_tokens=7\n"
    batch = b"[2026-09-14 03:21:01 TP0] Decode batch, #running-req: 1, #queue-req: 0\n"
    log = [b"llm-0 server " + line for line in (start, armed, key, *[batch] * 900)]
    said = bundle.around(log, 900).decode()
    for text in ("server_args=", "armed: page-table", "max_total_num_tokens=7", "Decode batch"):
        assert text in said
    assert "hunter2" not in said
    assert "AKIA" not in said


def test_an_error_that_quotes_a_client_is_left_out() -> None:
    said = b"[2026-09-14 03:20:06] [http_server] Error: the secret plan of Carol\n"
    assert b"Carol" not in bundle.around([said], 1)
