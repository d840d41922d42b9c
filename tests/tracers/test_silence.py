"""A tracer that is armed and judges nothing says so by itself, and a healthy silence is none."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers import silence
from g4debug.tracers.base import Context, Tracer
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap


class Server:
    """Steps of a scheduler with one tracer that counts what its hook sees."""

    def __init__(self, **declared: bool) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.modes = ForwardMode
        self.recorder = Recorder(4)
        tracer = Tracer("page-table", "what must hold", lambda context: None, **declared)
        trap = Trap(Settings(), Describer(self.recorder))
        self.context = Context(tracer.id, Hooks(), Settings(), self.recorder, trap)
        self.context.status.mode = "raise"
        self.silence = silence.Silence(self.recorder, [tracer])

    def steps(self, n: int, sees=False, mode="DECODE", requests=1, replay=False) -> None:
        batch = SimpleNamespace(forward_mode=self.modes[mode], reqs=[None] * requests)
        result = SimpleNamespace(can_run_cuda_graph=replay)
        for _ in range(n):
            self.recorder.count()
            self.context.checked(1, "steps")  # its hook at run_batch runs all the time
            if sees:
                self.context.checked(1, "tables")
            assert self.silence.after_step(result, None, batch) is result

    @property
    def state(self) -> str:
        return self.context.status.record().state


@pytest.fixture(autouse=True)
def _log(sglang, caplog):
    caplog.set_level(logging.WARNING, "g4debug")


def test_a_tracer_whose_hooks_are_passed_by_says_so_once(caplog):
    server = Server()
    server.steps(5, sees=True)
    server.steps(silence.STEPS - 1)
    assert caplog.messages == []
    server.steps(2 * silence.STEPS)
    (line,) = caplog.messages
    assert line.startswith("g4debug: page-table judges nothing: it is armed, and in 1000 steps ")
    assert "since step 6 " in line
    assert server.state == "armed: raise; judges nothing since step 6"
    assert not server.context.status.record().sound
    server.steps(1, sees=True)
    assert caplog.messages[1:] == ["g4debug: page-table judges again"]
    assert server.state == "armed: raise"


def test_it_may_be_blind_in_one_mode_only(caplog):
    server = Server(each_forward=True)
    for _ in range(silence.STEPS):
        server.steps(1, sees=True)
        server.steps(1, mode="EXTEND")
    (line,) = caplog.messages
    assert "in 1000 steps of EXTEND batches since step 2 " in line
    assert server.state == "armed: raise; judges nothing since step 2 of EXTEND batches"


def test_what_is_captured_in_a_graph_is_judged_in_each_replay(caplog):
    server = Server(each_forward=True)
    server.steps(silence.STEPS, replay=True)
    assert len(caplog.messages) == 1  # graphs without a check in them
    server.context.checked(1, "tables captured in CUDA graphs")
    server.steps(3 * silence.STEPS, replay=True)
    assert caplog.messages[1:] == ["g4debug: page-table judges again of DECODE batches"]
    server.steps(silence.STEPS)  # eager ones
    assert len(caplog.messages) == 3


def test_a_check_in_the_graphs_of_a_decode_is_none_in_those_of_a_prefill(caplog):
    server = Server(each_forward=True)
    server.context.checked(1, "tables captured in CUDA graphs")
    server.context.status.captured.add("DECODE")
    server.steps(silence.STEPS, replay=True)
    assert caplog.messages == []
    server.steps(silence.STEPS, mode="EXTEND", replay=True)
    (line,) = caplog.messages
    assert "in 1000 steps of EXTEND batches since step 1001 " in line
    server.context.status.captured.add("EXTEND")
    server.steps(1, mode="EXTEND", replay=True)
    assert caplog.messages[1:] == ["g4debug: page-table judges again of EXTEND batches"]


@pytest.mark.parametrize("healthy", ["idle", "off", "rests", "judges-nothing-ever"])
def test_a_healthy_silence_is_none(healthy, caplog):
    server = Server(judges=healthy != "judges-nothing-ever")
    if healthy == "off":
        server.context.off("there is nothing to check")
        caplog.clear()
    if healthy == "rests":
        server.context.status.rests = lambda mode: "a count is not due"
    server.steps(3 * silence.STEPS, requests=0 if healthy == "idle" else 1)
    server.steps(3 * silence.STEPS, mode="IDLE" if healthy == "idle" else "DECODE")
    assert caplog.messages == []
    assert server.context.status.record().silent == ()


def test_who_rests_is_asked_again(caplog):
    server = Server()
    reasons = ["a count is not due", ""]
    server.context.status.rests = lambda mode: reasons.pop(0)
    server.steps(2 * silence.STEPS)
    assert len(caplog.messages) == 1


def test_a_limit_of_one_mode_does_not_hide_that_it_is_blind_in_another(caplog):
    server = Server(each_forward=True)
    server.context.status.rests = lambda mode: "a limit says so" if mode == "DECODE" else ""
    for _ in range(2 * silence.STEPS):
        server.steps(1)
        server.steps(1, mode="EXTEND")
    (line,) = caplog.messages
    assert "in 1000 steps of EXTEND batches since step 2 " in line


def test_a_steady_count_is_missed_although_others_go_on(caplog):
    server = Server(steady=("verifies",))

    def steps(n, mode, verifies):
        for _ in range(n):
            server.context.checked(verifies, "verifies")
            server.steps(1, sees=True, mode=mode)

    steps(2 * silence.STEPS, "DECODE", 0)  # a server without a draft: it never grew
    steps(3, "DECODE", 1)
    steps(2 * silence.STEPS, "EXTEND", 0)  # nor in prefills
    assert caplog.messages == []
    for _ in range(silence.STEPS - 1):
        steps(1, "DECODE", 0)
        steps(1, "EXTEND", 0)
    assert caplog.messages == []
    steps(1, "DECODE", 0)
    (line,) = caplog.messages
    assert line.startswith("g4debug: page-table judges no verifies: it is armed, and in 1000 steps")
    assert " of DECODE batches since step " in line
    assert "judges nothing of verifies since step " in server.state
    steps(1, "DECODE", 1)
    assert caplog.messages[1:] == ["g4debug: page-table judges verifies again of DECODE batches"]
    assert server.state == "armed: raise"


def test_a_page_table_guard_rests_where_its_limits_are(tmp_path):
    from g4debug.tracers.page_table.tracer import PageTableTracer

    context = Context.alone("page-table", Settings(debug_dir=tmp_path))
    guard = PageTableTracer(context)
    guard._blind = {"EXTEND"}
    assert guard.rests("EXTEND")
    assert not guard.rests("DECODE"), "one phase is limited, and another one may be blind"
    context.recorder.step = 7
    guard.not_guarded("some lists are not judged", "they are elsewhere")
    assert guard.rests("DECODE"), "this step has met them"
    context.recorder.step = 8
    assert not guard.rests("DECODE"), "this one has not"
    guard.reads_nothing()
    assert guard.rests("DECODE"), "its kernels got K and V"


def test_what_is_met_when_a_graph_is_captured_may_be_met_in_each_replay(tmp_path):
    from g4debug.tracers.page_table.tracer import PageTableTracer

    guard = PageTableTracer(Context.alone("page-table", Settings(debug_dir=tmp_path)))
    guard.not_guarded("some lists are not judged", "they are elsewhere")  # before the first step
    guard.context.recorder.step = 9
    assert guard.rests("DECODE")
    # What was judged in a mode is asked for in that mode, whatever was met before the first step.
    guard.count(3, "tables")
    guard.after_run_batch(None, None, SimpleNamespace(forward_mode=SimpleNamespace(name="EXTEND")))
    guard.after_run_batch(None, None, SimpleNamespace(forward_mode=SimpleNamespace(name="DECODE")))
    assert not guard.rests("EXTEND")
    assert guard.rests("DECODE")


def test_a_server_without_a_draft_is_not_resting(tmp_path):
    from g4debug.tracers.spec_lifecycle.tracer import SpecLifecycle

    tracer = SpecLifecycle(Context.alone("spec-lifecycle", Settings(debug_dir=tmp_path)))
    tracer.judging = False
    tracer.sampled.judging = True
    assert not tracer.rests("DECODE"), "its sampled tokens are judged"
    tracer.sampled.skips = True
    assert tracer.rests("DECODE"), "a batch of beams is not followed"
    tracer.sampled.skips = tracer.sampled.judging = tracer.inputs.judging = False
    assert tracer.rests("DECODE")


def test_every_tracer_is_watched_but_for_the_one_that_checks_nothing(arm):
    from g4debug import discovery, plugin

    arm(SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_TRACE=",".join(discovery.names("tracer")))
    assert plugin.in_force is not None
    tracers = [discovery.load("tracer", name) for name in discovery.names("tracer")]
    assert [t.id for t in tracers if not t.judges] == ["flight-recorder"]
    entries = plugin.in_force.hooks._entries["scheduler.run_batch"]
    hooks = [getattr(e.after, "hook", None) for e in entries]
    assert "Silence.after_step" in [getattr(hook, "__qualname__", "") for hook in hooks]
