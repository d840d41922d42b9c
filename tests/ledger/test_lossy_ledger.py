"""A ledger that misses events, on healthy engines: it is given up, and nobody is accused.

The hooks of the ledger miss one call in n at random, in real engines with every tracer in ``raise``
mode. There is nothing wrong with these servers, so there must be no finding.
"""

from __future__ import annotations

import os
from pathlib import Path

import lossy_ledger
import pytest
from real_engine import ENGINE, drive

from g4debug import discovery

pytestmark = ENGINE
HERE = Path(__file__).parent
REPRO = HERE.parents[1] / "repro"
ROUNDS = {15: 3, 20: 3, 60: 5, 100: 8, 200: 12}  # after which it has missed enough to be given up
REQUESTS = 8


@pytest.mark.parametrize(
    "every",
    [
        60,
        *(
            pytest.param(every, marks=pytest.mark.long("one engine for each rate is enough"))
            for every in ROUNDS
            if every != 60
        ),
    ],
)
def test_a_ledger_that_misses_events_accuses_nobody(tmp_path, every):
    path = lossy_ledger.installed(tmp_path / "plugin")
    run = drive(
        tmp_path,
        str(HERE / "drive_lossy.py"),
        *map(str, (ROUNDS[every], REQUESTS, every)),
        PYTHONPATH=os.pathsep.join([path, str(REPRO)]),
        LOSSY_EVERY=str(every),
        LOSSY_SEED=os.environ.get("LOSSY_SEED", str(every)),
        G4DEBUG_TRACE=",".join(discovery.names("tracer")),
        G4DEBUG_LEAK_STEPS="4",
    )
    assert run.status == 0, run.log[-4000:]
    assert run.result == ROUNDS[every] * REQUESTS
    assert not run.dumps
    # It was really wrong, and where it missed much it said so.
    missed = [int(x.split()[-1]) for x in run.log.splitlines() if lossy_ledger.MISSED in x]
    assert sum(missed) > 0
    if every <= 60:
        assert "The server is not accused" in run.log
