"""CI runs README's test command in a clone with the name that README gives it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from warm import signals

pytestmark = [
    pytest.mark.once("no SGLang is imported"),
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
]

ROOT = Path(__file__).resolve().parents[2]
# Stands for make: notes where it was called and with what, and ends as it is told.
MAKE = """#!/bin/sh
echo "$PWD: $*" >> "$CALLS"
ls >> "$CALLS.files"
case "$*" in *SGLANG=*) exit "$OLDER";; esac
[ "$NEWEST" = hang ] || exit "$NEWEST"
echo $$ > "$CALLS.pid"
exec sleep 600
"""


class Checkout:
    """A repository with .ci/run, in a folder of some name."""

    def __init__(self, folder: Path, name: str) -> None:
        self.root = folder / "below" / name
        self.calls = folder / "calls"
        (self.root / ".ci").mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "run", self.root / ".ci")
        shutil.copy(ROOT / ".gitignore", self.root)
        identity = ("-c", "user.name=x", "-c", "user.email=x@x")
        for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "x")):
            subprocess.run(["git", *command], cwd=self.root, check=True)
        (folder / "bin").mkdir()
        (folder / "bin" / "make").write_text(MAKE)
        (folder / "bin" / "make").chmod(0o755)
        self.environ = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "CI": "true",
        }

    def start(self, newest: str = "0", older: str = "0") -> subprocess.Popen[bytes]:
        """As CI does: from another folder, without anything to read from."""
        return subprocess.Popen(
            [*signals(), str(self.root / ".ci" / "run")],
            cwd="/",
            env={**self.environ, "NEWEST": newest, "OLDER": older},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def called(self) -> list[tuple[Path, str]]:
        """Where make was called, and its arguments."""
        lines = (line.partition(": ") for line in self.calls.read_text().splitlines())
        return [(Path(where), what) for where, _, what in lines]

    def left(self) -> list[Path]:
        """What was not there before."""
        return list((self.root / ".g4debug").rglob("*"))


def test_it_is_the_name_that_readme_gives() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "\ngit clone <this repository> g4debug && cd g4debug && make" in readme


@pytest.mark.parametrize("name", ["g4debug", "checkout", "g4debug-2", "two words"])
def test_it_runs_in_a_clone_named_g4debug(tmp_path: Path, name: str) -> None:
    checkout = Checkout(tmp_path, name)
    assert checkout.start().wait(60) == 0
    where, what = zip(*checkout.called(), strict=True)
    assert what == ("test", "test SGLANG=0.5.12.post1")
    assert len(set(where)) == 1
    assert where[0].name == "g4debug"
    assert (where[0] == checkout.root) is (name == "g4debug")
    assert not checkout.left()


@pytest.mark.parametrize(
    ("newest", "older", "status"), [("0", "0", 0), ("2", "0", 2), ("0", "3", 3), ("2", "3", 3)]
)
@pytest.mark.parametrize("name", ["g4debug", "checkout"])
def test_one_release_that_fails_is_enough(
    tmp_path: Path, name: str, newest: str, older: str, status: int
) -> None:
    checkout = Checkout(tmp_path, name)
    assert checkout.start(newest, older).wait(60) == status
    assert len(checkout.called()) == 2
    assert not checkout.left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_tests_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    checkout = Checkout(tmp_path, "checkout")
    run = checkout.start("hang")
    pid = checkout.calls.with_suffix(".pid")
    end = time.monotonic() + 60
    while not (pid.is_file() and pid.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert checkout.left()
    run.send_signal(number)
    assert run.wait(60) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not checkout.left()
    assert len(checkout.called()) == 1


def test_a_checkout_that_cannot_be_cloned_fails(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "checkout")
    shutil.rmtree(checkout.root / ".git")
    assert checkout.start().wait(60) == 1
    assert not checkout.calls.exists()
    assert not checkout.left()
