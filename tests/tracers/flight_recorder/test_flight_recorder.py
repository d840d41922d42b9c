"""What the flight recorder makes of exceptions and hangs, and when it keeps quiet."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from g4debug.dumps import reading
from g4debug.findings.kinds import ARMED
from g4debug.findings.launch_memory import ALIVE, LaunchMemory, Stop
from g4debug.findings.peer_ranks import PeerRanks
from g4debug.findings.record import Finding, Location
from g4debug.findings.steps import Recorder
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import canary, running_clock
from g4debug.tracers.flight_recorder import progress as progress_module
from g4debug.tracers.flight_recorder import report as finding
from g4debug.tracers.flight_recorder.progress import Progress
from g4debug.tracers.flight_recorder.tracer import LOOP, TRACER, FlightRecorder
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap, TrapError

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …"


@pytest.fixture
def make(tmp_path):
    def make(**settings) -> Context:
        values = {"debug": True, "debug_dir": tmp_path / "dumps", **settings}
        settings = Settings(**values)
        recorder = Recorder(4)
        return Context(
            "flight-recorder", Hooks(), settings, recorder, Trap(settings, Describer(recorder))
        )

    return make


def batch(*rids: str, mode: str = "DECODE"):
    return SimpleNamespace(
        reqs=[SimpleNamespace(rid=r, req_pool_idx=i) for i, r in enumerate(rids)],
        seq_lens_cpu=torch.arange(len(rids)) + 7,
        forward_mode=SimpleNamespace(name=mode),
        spec_info=None,
    )


@pytest.mark.parametrize(("text", "told"), [(ILLEGAL, True), ("bad thing", False)])
def test_only_the_dump_of_a_cuda_error_tells_which_pages_its_requests_held(make, text, told):
    context = make()
    context.ledger = ledger = Ledger(context.recorder)
    ledger.pools["full"] = pool = PoolLedger("full", pages=100, page_size=64)
    for request, pages in (("gone", [1]), ("a", [3, 4]), ("b", [9])):
        ledger.enter(pool, "extend", np.array(pages), holds=True, request=request)
    TRACER.install(context)
    for rids in (("gone",), ("a",), ("a", "b")):
        context.recorder.begin_step(batch(*rids))
    end(context, RuntimeError(text))
    (record,) = dumps(context)
    held = {(h.pool, h.request, h.runs, h.count) for h in record.held}
    both = {("full", "a", (3, 4), 2), ("full", "b", (9, 9), 1)}
    assert held == (both if told else set())


def raising(error: BaseException):
    def run_event_loop(*args, **kwargs):
        raise error

    return run_event_loop


def end(context: Context, error: BaseException) -> BaseException:
    """The event loop raises ``error``, with all hooks on it; returns what comes out."""
    if targets.sglang_version() is None:
        pytest.skip("needs sglang's version")
    with pytest.raises(type(error)) as caught:
        context.hooks._compose(LOOP)(raising(error), "scheduler")
    return caught.value


def dumps(context: Context):
    return [reading.read(p) for p in sorted(context.settings.debug_dir.glob("*"))]


def test_an_exception_goes_on_as_it_was_and_leaves_a_dump(make, caplog):
    context = make()
    TRACER.install(context)
    context.recorder.begin_step(batch("a"))
    context.recorder.begin_step(batch("b", "c", mode="EXTEND"))
    error = ValueError("bad thing\nsecond line")
    assert end(context, error) is error
    (record,) = dumps(context)
    f = record.finding
    assert (f.check, f.kind, f.site) == ("flight-recorder", "exception", LOOP)
    assert f.headline == (
        "g4debug: flight-recorder in step 2 (EXTEND, 2 requests): ValueError: bad thing"
    )
    assert "test_flight_recorder.py" in f.got
    assert "surfaced" not in f.got
    assert f.history[-1].endswith("run_event_loop")
    assert not any(h.startswith(("/", "g4debug/hooking")) for h in f.history)
    assert (f.location.step, f.location.forward_mode, f.location.request) == (2, "EXTEND", "")
    assert [s.rids for s in record.steps] == [("a",), ("b", "c")]
    # All tracers were armed, none saw anything.
    assert (f.cause, f.next_command) == ("not known: no tracer reported anything before", "")
    assert f.headline in caplog.text


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({}, finding.BLOCKING),
        ({"debug": False, "trace": ("flight-recorder",)}, ARMED),
        ({"trace": ("flight-recorder",)}, ARMED),
    ],
)
def test_a_cuda_error_says_that_the_place_is_not_the_cause(make, settings, command):
    context = make(**settings)
    TRACER.install(context)
    context.recorder.begin_step(batch("a"))
    end(context, RuntimeError(ILLEGAL))
    (record,) = dumps(context)
    assert record.finding.kind == "cuda-error"
    assert record.finding.headline.endswith(
        "step 1 (DECODE, 1 request): RuntimeError: "
        "CUDA error: an illegal memory access was encountered"
    )
    assert "only where it surfaced" in record.finding.got
    assert record.finding.location.request == "a"
    assert record.finding.next_command == command


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        (ILLEGAL, True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("BatchDecode failed with error code: cudaErrorIllegalAddress", True),
        ("CUDA driver error: unspecified launch failure", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", True),
        ("NCCL error: unhandled cuda error", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("CUDA error: out of memory", False),
        ("cudaErrorMemoryAllocation", False),
        ("'FrozenKVMTPVerifyInput' object has no attribute 'topk_p'", False),
        ("", False),
    ],
)
def test_what_a_cuda_error_is(text, cuda):
    assert finding.is_cuda(RuntimeError(text)) is cuda


def test_a_cuda_error_behind_another_exception_is_one(make):
    context = make()
    TRACER.install(context)
    error = ValueError("Capture CUDA graph failed")
    error.__cause__ = RuntimeError(ILLEGAL)
    end(context, error)
    (record,) = dumps(context)
    assert record.finding.kind == "cuda-error"


def test_a_finding_of_a_tracer_has_its_own_dump_only(make):
    """Also if the tracer reports instead of the exception, and if SGLang wrapped the report."""
    context = make()
    TRACER.install(context)
    found = Finding("page-table", "k", "s", "g4debug: found", Location(), "e", "g")

    def report() -> None:
        context.trap.report(found)

    context.on_exception(LOOP, report)  # registered after, but runs before
    with pytest.raises(TrapError):
        context.hooks._compose(LOOP)(raising(RuntimeError(ILLEGAL)))
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = TrapError(found, None, "")
    assert end(make(), wrapped) is wrapped
    assert [r.finding.check for r in dumps(context)] == ["page-table"]


@pytest.fixture
def ranks():
    """This process is rank 0. ``stops()``: rank 3 of the same launch stops with a finding."""
    others = PeerRanks()
    others.make("L")
    others.join("L")
    others.name_ranks(0, 0, 0)
    third = LaunchMemory(os.dup(others.memory.fd))

    def stops(**stop) -> None:
        third.mine = 3
        third.name_ranks(stop.pop("dp", 0), 3, 0)
        said = {"check": "page-table", "kind": "stale", "headline": "g4debug: a stale page"}
        third.stop(Stop(**{**said, "dump": "/dumps/first.pt", **stop}), time.time_ns())

    yield others, stops
    third.close()
    others.close()


def test_a_rank_that_dies_because_another_one_is_gone_says_so(make, ranks):
    others, stops = ranks
    context = make()
    context.trap.others = others
    TRACER.install(context)
    stops()
    error = RuntimeError("Connection closed by peer")
    assert end(context, error) is error
    (record,) = dumps(context)
    f = record.finding
    assert (f.check, f.kind) == ("flight-recorder", "other-rank")
    assert f.headline.endswith("rank dp0/tp3/pp0 stopped the server: a stale page")
    assert "died of RuntimeError: Connection closed by peer in " in f.got
    assert "/dumps/first.pt" in f.cause
    assert f.next_command == "g4debug show /dumps/first.pt"
    assert others.memory.seat(others.memory.mine).stop.kind == "other-rank"


def test_another_replica_does_not_stop_the_server(make, ranks):
    others, stops = ranks
    context = make()
    context.trap.others = others
    TRACER.install(context)
    stops(dp=1)
    end(context, RuntimeError("Connection closed by peer"))
    (record,) = dumps(context)
    assert record.finding.headline.endswith("rank dp1/tp3/pp0 ended: a stale page")


def test_a_rank_is_dumped_once_whoever_is_first(make, ranks):
    others, stops = ranks
    context = make()
    context.trap.others = others
    recorder = FlightRecorder(context)
    recorder.install()
    stops(dump="")
    recorder.on_other_rank(others.first())
    end(context, RuntimeError("Connection closed by peer"))
    (record,) = dumps(context)
    assert record.finding.got.startswith("this rank found nothing; its main thread was in ")
    assert "it has left no dump" in record.finding.cause
    assert record.finding.next_command == "g4debug list"


def test_a_crash_is_told_to_the_other_ranks(make, ranks):
    others, _ = ranks
    context = make()
    context.trap.others = others
    TRACER.install(context)
    end(context, RuntimeError(ILLEGAL))
    stop = others.memory.seat(others.memory.mine).stop
    assert (stop.check, stop.kind) == ("flight-recorder", "cuda-error")
    assert stop.dump.endswith(".pt")
    assert not others.found()  # so SGLang's own evidence is not skipped


def test_a_finding_is_told_in_raise_mode_only(make, ranks):
    others, _ = ranks
    found = Finding("page-table", "k", "s", "g4debug: found", Location(), "e", "g")
    seat = others.memory.seat
    for mode in ("log", "contain"):
        context = make(mode=mode)
        context.trap.others = others
        context.trap.report(found)
        assert seat(others.memory.mine).state == ALIVE
    context = make()
    context.trap.others = others
    with pytest.raises(TrapError):
        context.trap.report(found)
    assert seat(others.memory.mine).stop.headline == "g4debug: found"
    assert others.found()


def test_a_finding_that_was_let_pass_is_the_first_suspect(make):
    context = make(mode="log", max_dumps=1)
    TRACER.install(context)
    found = Finding("page-table", "k", "s", "g4debug: page 99", Location(), "e", "g")
    context.trap.report(found)
    end(context, RuntimeError(ILLEGAL))
    records = {r.finding.check: r for r in dumps(context)}
    assert set(records) == {"page-table", "flight-recorder"}  # beyond the budget of one
    cause = records["flight-recorder"].finding.cause
    assert cause.startswith("this finding did not stop the server (log mode): g4debug: page 99 (")
    assert ".pt)" in cause


def test_a_budget_of_none_is_none(make, caplog):
    context = make(max_dumps=0)
    TRACER.install(context)
    end(context, ValueError("x"))
    assert not context.settings.debug_dir.exists()
    assert "no dump:  G4DEBUG_MAX_DUMPS=0" in caplog.text


def test_its_own_failure_is_told_and_the_exception_goes_on(make, caplog, monkeypatch):
    context = make()
    TRACER.install(context)
    monkeypatch.setattr(finding, "of_exception", lambda *a: 1 / 0)
    error = ValueError("the real one")
    assert end(context, error) is error
    assert "flight-recorder is limited" in caplog.text


def test_an_interrupt_is_no_crash(make):
    context = make()
    TRACER.install(context)
    end(context, KeyboardInterrupt())
    assert not context.settings.debug_dir.exists()


def test_a_dead_device_is_not_asked(make, monkeypatch):
    """What needs the driver is asked when the scheduler is up, and never again."""
    from g4debug.trapping import describe

    context = make()
    recorder = FlightRecorder(context)
    recorder.after_scheduler_init(None)
    monkeypatch.setattr(describe, "device", lambda: 1 / 0)
    monkeypatch.setattr(describe, "versions", lambda: 1 / 0)
    for name in ("item", "tolist", "cpu", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a: 1 / 0)
    allocator = SimpleNamespace(
        page_size=16, size=160, available_size=lambda: len(torch.zeros(3)) * 16
    )
    context.recorder.attach(SimpleNamespace(token_to_kv_pool_allocator=allocator))
    try:
        raise RuntimeError(ILLEGAL)
    except RuntimeError:
        recorder.on_loop_exception()
    monkeypatch.undo()
    (record,) = dumps(context)
    assert record.versions["torch"]
    assert record.pools[0].used_tokens == 160 - 48


# -- hangs -------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        fake = SimpleNamespace(monotonic=lambda: self.now)
        for module in (progress_module, running_clock):
            monkeypatch.setattr(module, "time", fake)

    def run(self, progress: Progress, seconds: int) -> None:
        """The process runs for so long, and its loop makes no round."""
        for _ in range(seconds):
            self.now += 1
            progress.clock.tick()


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def scheduler(waiting: int = 0, running: int = 0, **more):
    return SimpleNamespace(
        waiting_queue=[object() for _ in range(waiting)],
        running_batch=SimpleNamespace(reqs=[object() for _ in range(running)]),
        **more,
    )


def test_an_idle_loop_that_comes_round_is_not_hung(clock):
    recorder = Recorder(2)
    recorder.attach(scheduler())
    progress = Progress(recorder)
    for _ in range(1000):
        clock.now += 1
        progress.came_round("self")
    recorder.attach(scheduler(waiting=1))  # a request has just come
    assert progress.hang(10) is None


def test_a_step_that_does_not_come_back(clock):
    recorder = Recorder(2)
    recorder.attach(scheduler(running=2))
    progress = Progress(recorder)
    progress.came_round()
    recorder.begin_step(batch("a", "b"))
    progress.step_begins()
    clock.run(progress, 9)
    assert progress.hang(10) is None
    clock.run(progress, 2)
    hang = progress.hang(10)
    assert (hang.seconds, hang.stuck, hang.first) == (11, True, True)
    assert hang.what == "step 1 (DECODE, 2 requests) has not returned for 11 s"
    progress.step_ends(None)
    after = "the event loop has been stuck for 11 s, after step 1 (DECODE, 2 requests)"
    assert progress.hang(10).what == after
    progress.came_round()
    assert progress.hang(10) is None


def test_requests_that_no_step_serves(clock):
    recorder = Recorder(2)
    recorder.attach(scheduler(waiting=3, running=1))
    progress = Progress(recorder)
    for _ in range(12):
        clock.now += 1
        progress.came_round()
    hang = progress.hang(10)
    assert not hang.stuck
    assert "has begun no step for 12 s (3 requests waiting, 1 begun)" in hang.what
    recorder.scheduler._engine_paused = True
    assert progress.hang(10) is None


def test_a_prompt_between_two_of_its_chunks_is_work(clock):
    """It is in no list then. One that is never admitted again hangs the server."""
    recorder, chunked = Recorder(2), object()
    recorder.attach(scheduler(chunked_req=chunked))
    progress = Progress(recorder)
    for _ in range(12):
        clock.now += 1
        progress.came_round()
    assert "(0 requests waiting, 1 begun)" in progress.hang(10).what
    recorder.scheduler.running_batch.reqs.append(chunked)
    assert "1 begun" in progress.hang(10).what
    recorder.scheduler.chunked_req = None
    recorder.scheduler.running_batch.reqs.clear()
    assert progress.hang(10) is None


class Box:
    """Stands for the black box, which the first process of a test does not make."""

    asked_at = 0

    def asked(self, time_ns: int) -> None:
        self.asked_at = time_ns

    def left(self, path: str) -> None:
        pass


def test_sigterm_dumps_a_hang_only(make, clock):
    context = make(hang_seconds=5)
    recorder = FlightRecorder(context)
    context.recorder.attach(scheduler(running=1))
    recorder.boxing.box = box = Box()
    recorder.progress.came_round()
    recorder.watch.at_once()
    recorder.on_sigterm()
    assert not context.settings.debug_dir.exists()
    assert box.asked_at > 0  # if the server dies of it, too, nobody sees that it was asked for
    clock.run(recorder.progress, 6)
    recorder.watch.at_once()
    recorder.on_sigterm()
    assert box.asked_at == 0
    (record,) = dumps(context)
    f = record.finding
    assert f.kind == "hang"
    assert f.headline == (
        "g4debug: flight-recorder: the scheduler hangs: "
        "the event loop has been stuck for 6 s, before its first step"
    )
    assert "no progress for 6 s; the main thread is in" in f.got
    assert "SIGTERM" in f.got
    assert f.expected.startswith("progress within 5 s (G4DEBUG_HANG_SECONDS)")


def test_the_main_threads_place_is_read_from_another_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(finding.main_thread()))
    thread.start()
    thread.join()
    assert seen
    assert any("test_the_main_threads_place_is_read_from_another_thread" in place for place in seen)


@pytest.mark.parametrize(
    ("module", "file", "place"),
    [
        ("sglang.srt.a", "/x/lib/python3.11/site-packages/sglang/srt/a.py", "sglang/srt/a.py:7 f"),
        ("sglang.srt.a", "/sgl-workspace/sglang/python/sglang/srt/a.py", "sglang/srt/a.py:7 f"),
        ("sglang.srt", "/x/site-packages/sglang/srt/__init__.py", "sglang/srt/__init__.py:7 f"),
        ("g4debug.cpu.fault", "/opt/g4debug/g4debug/cpu/fault.py", "g4debug/cpu/fault.py:7 f"),
        # below folders that are called like a package, or like a folder of packages
        ("g4debug.cpu.fault", "/sglang/g4debug/g4debug/cpu/fault.py", "g4debug/cpu/fault.py:7 f"),
        ("g4debug.cpu.fault", "/site-packages/x/g4debug/cpu/fault.py", "g4debug/cpu/fault.py:7 f"),
        ("plugin.look", "/sglang/g4debug/plugin/look.py", "plugin/look.py:7 f"),
        ("__main__", "/data/me/sglang/g4debug/some/serve.py", "some/serve.py:7 f"),
        # a function whose file is not its module's
        ("torch.made.abc", "/data/me/cache/ab/abc.py", "ab/abc.py:7 f"),
        ("threading", "/usr/lib/python3.11/threading.py", "python3.11/threading.py:7 f"),
        ("", "<string>", "<string>:7 f"),
    ],
)
def test_a_place_has_no_path_of_the_machine(module, file, place):
    assert finding._place(module, file, 7, "f") == place


def test_the_cost_of_a_step_at_batch_64_is_microseconds():
    """Measured: about 33; the limit leaves room for a busy machine."""
    requests = [
        SimpleNamespace(
            rid=f"{i:032x}",
            req_pool_idx=i,
            kv_allocated_len=1000,
            kv_committed_len=990,
            swa_evicted_seqlen=512,
        )
        for i in range(64)
    ]
    b = batch()
    b.reqs, b.seq_lens_cpu = requests, torch.arange(64)
    recorder = Recorder(64)
    recorder.attach(scheduler(waiting=3))
    progress = Progress(recorder)

    def step() -> None:
        progress.came_round()
        recorder.begin_step(b)
        progress.step_begins()
        progress.step_ends(None)

    def seconds() -> float:
        begin = time.thread_time()  # of this thread alone: others run here, too
        for _ in range(200):
            step()
        return (time.thread_time() - begin) / 200

    cheapest = min(seconds() for _ in range(20))
    print(f"{cheapest * 1e6:.1f} us")
    assert cheapest < 85e-6
    kept = recorder.current
    assert (len(kept.allocated), kept.rows[:3], kept.waiting) == (64, (0, 1, 2), 3)


def test_the_canary_bites_and_can_fail(tmp_path, monkeypatch):
    assert "3 steps" in canary.fire(tmp_path / "a", torch.device("cpu"))
    monkeypatch.setattr(finding, "is_cuda", lambda e: False)
    with pytest.raises(canary.CanaryError, match="took a CUDA error for exception"):
        canary.fire(tmp_path / "b", torch.device("cpu"))
    monkeypatch.setattr(FlightRecorder, "on_loop_exception", lambda self: None)
    with pytest.raises(canary.CanaryError, match="expected one dump, got 0"):
        canary.fire(tmp_path / "c", torch.device("cpu"))


def test_every_field_of_a_step_survives_the_dump(make):
    context = make()
    recorder = FlightRecorder(context)
    b = batch("a", "b")
    for r in b.reqs:
        r.kv_allocated_len, r.kv_committed_len, r.swa_evicted_seqlen = 64, 63, 0
    context.recorder.attach(scheduler(waiting=2))
    context.recorder.begin_step(b)
    recorder.progress.round_ran -= 100
    recorder.on_sigterm()
    (record,) = dumps(context)
    assert record.steps == (context.recorder.current,)
    values = dataclasses.asdict(record.steps[0])
    assert values["allocated"] == (64, 64)
    assert values["committed"] == (63, 63)
    assert values["evicted"] == (0, 0)
    assert abs(values["time_ns"] - time.time_ns()) < 60e9
