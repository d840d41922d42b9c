"""A replay whose time is up ends with its step, so that what is known up to there is told."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_memory import waiting

from g4debug.replay import child

pytestmark = pytest.mark.once("a fork is waited for without SGLang")


def ended(stop: Path, body: Callable[[], None], workload: object = None) -> int:
    """The status of a fork that does this, and had a third of a second."""
    replayer, answers = waiting(1 << 60)
    pid = os.fork()
    if not pid:
        body()
        os._exit(0)
    job = {"seconds": 0.3, "result": "x", "stop": str(stop), "workload": workload}
    replayer._wait(pid, job)
    status: int = json.loads(answers.getvalue().splitlines()[-1])["status"]
    return status


def test_it_is_asked_to_end_and_told_why(tmp_path: Path) -> None:
    stop = tmp_path / "stop"

    def body() -> None:
        while not stop.exists():
            time.sleep(0.01)

    assert os.WIFEXITED(ended(stop, body))
    assert stop.read_text() == "the 0 s are up"


def test_it_is_killed_if_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "TO_END", 0.3)
    assert os.WIFSIGNALED(ended(tmp_path / "stop", lambda: time.sleep(600)))


def test_a_part_of_the_requests_tells_nothing_of_the_states(tmp_path: Path) -> None:
    """So a try of --shrink is killed."""
    stop = tmp_path / "stop"
    assert os.WIFSIGNALED(ended(stop, lambda: time.sleep(600), {"items": [1]}))
    assert not stop.exists()
