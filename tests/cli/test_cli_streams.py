"""What cannot be written or read is said in one line, by every command; never by a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import published
import pytest
import real_cores
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing

pytestmark = pytest.mark.once("commands do not import SGLang")

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

CALLS = {
    "help": ("--help",),
    "nothing": (),
    "version": ("--version",),
    "show": ("show", "DIR/a.pt"),
    "show-json": ("show", "DIR/a.pt", "--json"),
    "show-help": ("show", "--help"),
    "report": ("report", "DIR/a.pt", "-o", "-"),
    "report-file": ("report", "DIR/a.pt", "-o", "DIR/a.html"),
    "diff": ("diff", "DIR/a.pt", "DIR/b.pt"),
    "diff-json": ("diff", "DIR/a.pt", "DIR/b.pt", "--json"),
    "list": ("list", "DIR"),
    "list-json": ("list", "DIR", "--json"),
    "faults": ("faults",),
    "faults-json": ("faults", "--json"),
    "fixes": ("fixes",),
    "fixes-json": ("fixes", "--json"),
    "doctor": ("doctor", "--no-canary"),
    "replay": ("replay", "DIR/a.pt"),
    "replay-json": ("replay", "DIR/a.pt", "--json"),
    "pools": ("pools", "DIR/config.json", "--memory", "40GiB"),
    "pools-json": ("pools", "DIR/config.json", "--memory", "40GiB", "--json"),
    "autopsy": ("autopsy", "DIR/core"),
    "autopsy-json": ("autopsy", "DIR/core", "DIR/mapped.pt", "--json"),
    "where": ("where", "0x7f0000000000", "DIR/mapped.pt"),
    "where-json": ("where", "0x7f0000000000", "DIR/mapped.pt", "--json"),
    "triage": ("triage", "17"),
    "triage-json": ("triage", "17", "--json"),
    "trace": ("trace", "77e1", "DIR/a.pt"),
    "trace-json": ("trace", "77e1", "DIR/a.pt", "--json"),
    "cpu-server-help": ("cpu-server", "--help"),
}
LONG = ("doctor",)  # it loads SGLang
SOME = ("help", "show-json", "show-help", "report-file", "diff", "list", "faults", "pools")
CORE = "xqa-ten-million"
QUICK = [pytest.param(n, marks=pytest.mark.engine) if n in LONG else n for n in CALLS]


def test_every_command_is_among_the_calls() -> None:
    commands = {cli._load(name).NAME for name in cli.command_names()}
    assert commands == {call[0] for call in CALLS.values() if call and call[0][0] != "-"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Two dumps and a model's config, where any user may read and write."""
    with tempfile.TemporaryDirectory(prefix="g4debug-streams-") as name:
        here = Path(name)
        here.chmod(0o777)
        for dump in ("a.pt", "b.pt"):
            writing.write(writing.encode(sample_record()), here, dump)
        writing.write(writing.encode(real_cores.record(CORE)), here, "mapped.pt")
        (here / "core").write_bytes(real_cores.core(CORE))
        published.folder(here, published.DENSE_31B)
        for file in here.iterdir():
            file.chmod(0o644)
        yield here


def run(call: tuple[str, ...], folder: Path, redirect: str) -> subprocess.CompletedProcess[str]:
    """``call`` through a shell, which does ``redirect``; its output is what the shell leaves."""
    arguments = [a.replace("DIR", str(folder)) for a in call]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "g4debug", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def says_in_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("g4debug: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "report this" not in done.stderr
    for word in words:
        assert word in done.stderr


@needs_full
@pytest.mark.parametrize("name", QUICK)
def test_a_full_output(folder: Path, name: str) -> None:
    done = run(CALLS[name], folder, ">/dev/full")
    says_in_one_line(done, "standard output", "No space left on device")


@pytest.mark.parametrize("name", SOME)
def test_a_closed_output(folder: Path, name: str) -> None:
    (folder / "a.html").unlink(missing_ok=True)
    says_in_one_line(run(CALLS[name], folder, ">&-"), "standard output is closed")
    assert not (folder / "a.html").exists()  # and nothing was done


@pytest.mark.parametrize("name", SOME)
def test_a_closed_pipe_is_silent(folder: Path, name: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    arguments = [a.replace("DIR", str(folder)) for a in CALLS[name]]
    with os.fdopen(write_end, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "g4debug", *arguments],
            stdout=out,
            stderr=subprocess.PIPE,
            timeout=600,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_an_error_that_nobody_can_read_is_still_an_error(folder: Path, redirect: str) -> None:
    done = run(("show", "DIR/none.pt"), folder, redirect)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    done = run(("show", "--no-such-option"), folder, redirect)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.fixture(scope="module")
def closed() -> Iterator[Path]:
    """A folder that only root may look into, with a dump in it."""
    with tempfile.TemporaryDirectory(prefix="g4debug-closed-") as name:
        here = Path(name)
        writing.write(writing.encode(sample_record()), here, "a.pt")
        here.chmod(0o700)
        yield here


FORBIDDEN = {
    "report-to": ("report", "DIR/a.pt", "-o", "CLOSED/x.html"),
    "report-of": ("report", "CLOSED/a.pt"),
    "show": ("show", "CLOSED/a.pt"),
    "show-folder": ("show", "CLOSED"),
    "show-svg": ("show", "DIR/a.pt", "--svg", "CLOSED/x.svg"),
    "diff": ("diff", "DIR/a.pt", "CLOSED/a.pt"),
    "list": ("list", "CLOSED"),
    "pools": ("pools", "CLOSED/x", "--memory", "40GiB"),
    "pools-svg": ("pools", "DIR/config.json", "--memory", "40GiB", "--svg", "CLOSED/x.svg"),
}


@needs_root
@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_another_user_may_not_read_or_write(
    folder: Path, closed: Path, name: str, nobody: Any
) -> None:
    call = [a.replace("CLOSED", str(closed)).replace("DIR", str(folder)) for a in FORBIDDEN[name]]

    def main() -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(call)
        return json.dumps([code, err.getvalue()])

    # As root: what is imported late, here and for an error, may lie where only root can read.
    main()
    cli.program()
    for left in closed.glob("x.*"):
        left.unlink()
    said = nobody[1](main)
    code, err = json.loads(said)
    says_in_one_line(
        subprocess.CompletedProcess(call, code, "", err), str(closed), "Permission denied"
    )
