"""The fault ``delayed-step``: who runs while it waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from g4debug.faults import delayed_step
from g4debug.tracers.flight_recorder import busy


def test_a_compiler_runs_while_it_waits_and_is_gone_afterwards(monkeypatch):
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        pytest.skip("this kernel does not tell the children of a process")
    said = []
    monkeypatch.setattr(delayed_step, "stall", lambda ms: said.append((ms, busy.doing(["a:1 f"]))))
    delayed_step.compile_for(7)
    assert said == [(7, "waiting for a compiler, as it seems: it has started nvcc")]
    assert busy.doing(["a:1 f"]) == ""
