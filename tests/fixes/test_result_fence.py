"""result-fence: SGLang's own barrier right after a launch, where a prefill's result comes next."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.fixes.base import state_of
from g4debug.fixes.result_fence import after_run_batch


def scheduler(last: str, overlap: bool = True, enabled: bool = True) -> SimpleNamespace:
    """A stand-in for a scheduler of 0.5.15: what the fix asks of it. ``events``: what was done."""
    events: list[str] = []
    runner = SimpleNamespace(war_fastpath_read_done_event="read")
    return SimpleNamespace(
        enable_overlap=overlap,
        _war_barrier_enabled=enabled,
        _apply_war_barrier=lambda: events.append(f"wait {runner.war_fastpath_read_done_event}"),
        model_worker=SimpleNamespace(war_fastpath_runner=runner),
        last_batch=SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: last == "decode")
        ),
        events=events,
    )


def test_it_waits_before_a_prefills_result_and_keeps_the_batchs_own():
    it = scheduler("prefill")
    assert after_run_batch("result", it, "batch") == "result"
    assert it.events == ["wait read"]
    assert it.model_worker.war_fastpath_runner.war_fastpath_read_done_event == "read"


@pytest.mark.parametrize(
    "it",
    [scheduler("decode"), scheduler("prefill", overlap=False), scheduler("prefill", enabled=False)],
)
def test_it_waits_nowhere_else(it):
    assert after_run_batch("result", it, "batch") == "result"
    assert it.events == []


@pytest.mark.written_for("result-fence")
def test_it_is_in_force_by_default(arm):
    arm()
    assert state_of("result-fence") == "applied"


@pytest.mark.written_for("result-fence")
def test_sglangs_scheduler_has_what_it_asks_for(sglang):
    from sglang.srt.managers.scheduler import Scheduler

    assert callable(Scheduler._apply_war_barrier)
