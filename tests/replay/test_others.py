"""Of a fix or another release it is only said that a finding does not come if it could have."""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from g4debug.findings.record import Finding, Location, TrapRecord
from g4debug.findings.status import Limit, TracerStatus
from g4debug.findings.tape import Recording, Start, Why
from g4debug.replay import run
from g4debug.replay.feeder import MORE, SLOWER, Feeder, TapeEnd
from g4debug.replay.host import Outcome
from g4debug.replay.tokens import Tokens
from g4debug.replay.workload import BEHIND

pytestmark = pytest.mark.once("it needs no SGLang")
STEPS = 500
RECORDING = Recording(
    Start(Why.START, 0, 0, 0, 0, 0.7, 0), {}, [], array("H", range(STEPS)), {}, 16, False
)
FOUND = Finding("page-table", "stale", "attn.x", "g4debug: it", Location(step=9), "", "")
ARMED = (TracerStatus("page-table", mode="raise"),)


def record(**changes: Any) -> TrapRecord:
    return dataclasses.replace(TrapRecord(FOUND, "2026", tracers=ARMED), **changes)


def fed(to_the_end: bool, busy: int, recording: Recording = RECORDING) -> int:
    """The steps of a scheduler with an empty tape whose requests take so many."""
    feeder = Feeder(recording, Tokens(recording, 100))
    feeder._on = True
    if to_the_end:
        feeder.to_the_end()
    turns = 0
    with contextlib.suppress(TapeEnd):
        while True:
            feeder.receive(list)
            if turns < busy:
                feeder.run(None, SimpleNamespace(reqs=[]))
            else:
                feeder.idle()
            turns += 1
    return feeder.steps


def test_with_a_fix_the_scheduler_goes_on_until_all_requests_have_ended() -> None:
    assert fed(False, STEPS + 90) == STEPS + BEHIND
    assert fed(True, STEPS + 90) == STEPS + 90
    assert fed(True, 1 << 20) == max(SLOWER * STEPS, STEPS + MORE)
    assert fed(True, 9) == 9


@pytest.mark.parametrize("why", [Why.IDLE, Why.BUSY])
def test_a_tape_from_the_middle_goes_on_until_all_requests_have_ended(why: Why) -> None:
    """What ran there before its beginning is lacking, so batches and their number are others."""
    middle = dataclasses.replace(RECORDING, begins=dataclasses.replace(RECORDING.begins, why=why))
    assert fed(False, STEPS + 90, middle) == STEPS + 90


@pytest.mark.parametrize(
    ("outcome", "there", "said"),
    [
        ({}, {}, f"it does not come in {STEPS} steps, by which all requests had ended"),
        ({"works": True}, {}, "cannot be told: it did not come in 500 steps, and requests still"),
        ({"last": record(tracers=())}, {}, "but page-table was not armed here"),
        (
            {"last": record(tracers=(TracerStatus("page-table", off="it failed"),))},
            {},
            "cannot be told: it did not come in 500 steps, but page-table was not armed",
        ),
        (
            {"last": record(tracers=(dataclasses.replace(ARMED[0], limits=(Limit("x", "y"),)),))},
            {},
            "but page-table did not look at all of it here (armed: raise; limited: x (y))",
        ),
        ({"last": None}, {}, "but the replay left no dump"),
        ({}, {"faults": ("page-oob #1",)}, "but a fault was injected there"),
        ({"ended": "stuck"}, {}, "cannot be told: it stood still in the middle of the tape"),
        ({"records": (record(),)}, {}, "it comes, in step 109"),
    ],
)
def test_what_is_said_of_a_finding_on_another_release(
    outcome: dict[str, Any], there: dict[str, Any], said: str
) -> None:
    ran = Outcome("tape", "", RECORDING, {}, (), record(), 0, 1.0)
    ran = dataclasses.replace(ran, **outcome)
    assert said in run._with_it(FOUND, ran, record(**there), 100)
