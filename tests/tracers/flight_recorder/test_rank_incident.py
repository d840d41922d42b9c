"""What SGLang saves before a crash is skipped after a finding, on SGLang's own function."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
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


def test_a_block_that_another_program_has_mapped_stays():
    """It may be that one's own. What only this process and its children have mapped goes."""
    ours, shared, theirs = (shared_memory.SharedMemory(create=True, size=64) for _ in range(3))
    other = subprocess.Popen(  # not a child: its parent ends at once
        [sys.executable, "-c", ORPHAN, shared.name, theirs.name], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    pid = int(other.stdout.readline())
    other.wait()
    theirs.close()  # here it is not mapped any more
    try:
        rank_incident.remove_shared_memory()
        assert {s.name for s in (ours, shared, theirs) if Path("/dev/shm", s.name).exists()} == {
            shared.name, theirs.name,
        }  # fmt: skip
    finally:
        os.kill(pid, signal.SIGKILL)
        ours.close()
        shared.close()
        resource_tracker.unregister(f"/{ours.name}", "shared_memory")  # its name is gone already
        for block in (shared, theirs):
            block.unlink()


# Prints the number of a process that has mapped these blocks, and that no one is the parent of.
ORPHAN = """
import mmap, os, signal, sys
blocks = []
for name in sys.argv[1:]:
    with open("/dev/shm/" + name, "r+b") as file:
        blocks.append(mmap.mmap(file.fileno(), 64))
pid = os.fork()
if pid == 0:
    os.setsid()
    os.close(1)
    signal.pause()
print(pid, flush=True)
os._exit(0)
"""
