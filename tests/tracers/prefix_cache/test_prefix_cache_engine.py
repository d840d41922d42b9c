"""prefix-cache in a real engine on the CPU: silent when all is well, and told when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engine import ENGINE, drive

pytestmark = ENGINE
HERE = Path(__file__).parent
DRIVE = str(HERE / "drive_shared_prefix.py")


def test_a_healthy_engine_is_judged_and_nothing_is_found(tmp_path):
    run = drive(tmp_path, DRIVE, SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_LEAK_STEPS="2")
    assert run.status == 0, run.log[-3000:]
    assert max(run.result) > 128  # pages were handed out
    assert run.dumps == []
    assert "prefix-cache" in run.log
    assert "prefix-cache is off" not in run.log


@pytest.mark.parametrize(
    ("fault", "check", "kinds"),
    [
        ("cached-page-alias=1*on", "prefix-cache", {"wrong-page"}),
        *(
            pytest.param(fault, "prefix-cache", {kind}, marks=pytest.mark.long("a drill each"))
            for fault, kind in (
                ("insert-wrong-page=1*on", "wrong-page"),
                ("insert-too-long=1*on", "beyond"),
                ("protected-page=1*on", "protected"),
            )
        ),
    ],
)
def test_a_drill_is_told(tmp_path, fault, check, kinds):
    run = drive(
        tmp_path, DRIVE, SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_LEAK_STEPS="2", G4DEBUG_FAULTS=fault
    )
    first = min(run.dumps, key=lambda record: record.created)
    assert (first.finding.check, first.finding.kind in kinds) == (check, True), (
        first.finding.headline
    )
