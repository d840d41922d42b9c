"""What SGLang saves before a crash is skipped after a finding, on SGLang's own function."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from g4debug import plugin
from g4debug.findings.launch_memory import Stop
from g4debug.hooking import targets
from g4debug.tracers.flight_recorder import rank_incident


@pytest.fixture
def before_crash(arm):
    """SGLang's function with our hook on it, and the ranks that this process knows."""
    arm(SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_TRACE="flight-recorder")
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    def call() -> float:
        manager = SimpleNamespace(crash_dump_folder="", crash_dump_performed=False)
        begin = time.monotonic()
        TokenizerManager.dump_requests_before_crash(manager)
        return time.monotonic() - begin

    assert plugin.in_force is not None
    return call, plugin.in_force.others


def test_after_a_finding_nothing_waits(before_crash):
    call, others = before_crash
    others.join(os.environ["G4DEBUG_LAUNCH"])
    others.stop(Stop("page-table", "stale", "g4debug: …"))
    assert call() < 5  # for which SGLang would wait
    assert not set(rank_incident.SAVES) & set(os.environ)


@pytest.mark.skipif(not targets.matches(">=0.5.23"), reason="SGLang does not wait there")
@pytest.mark.parametrize("why", ["exception", "nothing", "asked"])
def test_after_anything_else_sglang_saves_what_it_did(before_crash, why, monkeypatch, caplog):
    import sglang.srt.managers.tokenizer_manager as module

    call, others = before_crash
    others.join(os.environ["G4DEBUG_LAUNCH"])
    if why == "exception":
        others.stop(Stop("flight-recorder", "exception", "g4debug: …"))
    elif why == "asked":
        monkeypatch.setenv("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "1")
        others.stop(Stop("page-table", "stale", "g4debug: …"))
    slept = []
    clock = SimpleNamespace(**{**vars(time), "sleep": slept.append})
    monkeypatch.setattr(module, "time", clock)
    call()
    assert slept == [5]  # and no scheduler is there to be asked
