"""pool-leak on a real engine: what the turns of a session hold is theirs, and no leak."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engine import ENGINE, drive

pytestmark = ENGINE
DRIVER = Path(__file__).with_name("drive_session.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    every_step = {"G4DEBUG_TRACE": "pool-leak", "G4DEBUG_LEAK_STEPS": "1"}
    return drive(tmp_path_factory.mktemp("session"), str(DRIVER), **every_step)


def test_a_session_leaks_nothing(run):
    assert run.status == 0, run.log[-3000:]
    first, *later = run.result
    assert later == [first + 24 + 70, first + 2 * (24 + 70)]  # each turn went on where one ended
    assert run.dumps == []
    assert "pool-leak is off" not in run.log
