"""pool-leak on real engines that hold pages where no batch shows them: nothing is a leak.

The turns of a session, and what disaggregated decode reserves ahead.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engine import ENGINE, drive

pytestmark = ENGINE
HERE = Path(__file__).parent
REPRO = HERE.parents[2] / "repro"
EVERY_STEP = {"G4DEBUG_LEAK_STEPS": "1"}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    return drive(folder, str(HERE / "drive_session.py"), G4DEBUG_TRACE="pool-leak", **EVERY_STEP)


def test_a_session_leaks_nothing(session):
    assert session.status == 0, session.log[-3000:]
    first, *later = session.result
    assert later == [first + 24 + 70, first + 2 * (24 + 70)]  # each turn went on where one ended
    assert session.dumps == []
    assert "pool-leak is off" not in session.log


@pytest.mark.long("a pair of servers")
def test_disaggregated_decode_leaks_nothing(tmp_path):
    run = drive(
        tmp_path,
        str(HERE / "drive_disaggregated.py"),
        PYTHONPATH=str(REPRO),
        SGLANG_TRTLLM_MHA_DEBUG="1",
        **EVERY_STEP,
    )
    assert run.status == 0, run.log[-3000:]
    got, asked = run.result
    assert got == asked
    assert run.dumps == []
    assert "g4debug: the page ledger is off" not in run.log
