"""What is told of a loop that stands: on SIGTERM, before SGLang's watchdog kills, and without one.

Real processes: test_flight_recorder_engine.py. The loop that turns: test_standing.py.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from g4debug.dumps import reading
from g4debug.findings.launch_memory import LaunchMemory
from g4debug.findings.peer_ranks import PeerRanks
from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import busy, report, running_clock
from g4debug.tracers.flight_recorder import progress as progress_module
from g4debug.tracers.flight_recorder.tracer import FlightRecorder
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap

LOOP = [
    "sglang/srt/managers/scheduler.py:1500 event_loop_overlap",
    "sglang/srt/managers/scheduler.py:3183 run_batch",
]
DEVICE = "torch/cuda/streams.py:250 synchronize"
TRITON = "triton/compiler/compiler.py:280 compile"
CONTROL = [LOOP[0], "sglang/srt/managers/scheduler.py:2253 process_input_requests"]


class Server:
    """A scheduler of which the loop stands: its clock, its main thread, its finding.

    at: the frames of its main thread, outermost first.
    """

    def __init__(self, monkeypatch, folder, **arguments) -> None:
        self.now, self.at = 1000.0, [*LOOP, DEVICE]
        fake = SimpleNamespace(monotonic=lambda: self.now)
        for module in (progress_module, running_clock):
            monkeypatch.setattr(module, "time", fake)
        monkeypatch.setattr(report, "main_thread", lambda: self.at)
        monkeypatch.setattr(busy, "_compilers", lambda: iter(self.compilers))
        self.compilers: list[str] = []
        settings = Settings(debug=True, debug_dir=folder, hang_seconds=20)
        self.folder, self.recorder = folder, Recorder(4)
        trap = Trap(settings, Describer(self.recorder), self.recorder.status)
        self.context = Context("flight-recorder", Hooks(), settings, self.recorder, trap)
        self.flight = FlightRecorder(self.context)
        args = SimpleNamespace(**{"watchdog_timeout": 300, **arguments})
        batch = SimpleNamespace(reqs=[object()])
        self.has = SimpleNamespace(waiting_queue=[], running_batch=batch, server_args=args)
        self.recorder.attach(self.has)
        self.round()
        self.flight.progress.step_begins()
        self.flight.progress.step_ends(None)  # its first step is over
        self.round()

    def round(self) -> None:
        self.flight.progress.came_round()

    def steps(self, count: int, seconds: float = 0.5, **size: int) -> None:
        """It makes steps, each in a round of its own. size: as of ``launch``."""
        for _ in range(count):
            self.launch(**size)
            self.now += seconds
            self.flight.stuck.tick()
            self.round()

    def launch(self, new: int = 1, context: int = 1000, decodes: int = 0) -> None:
        """decodes: so many requests, of which the host does not know the lengths."""
        mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: decodes > 0)
        batch = SimpleNamespace(
            forward_mode=mode, reqs=[None] * decodes, extend_num_tokens=None if decodes else new,
            seq_lens_cpu=None if decodes else torch.tensor([context]),
        )  # fmt: skip
        self.flight.progress.step_begins(self.has, batch)
        self.flight.progress.step_ends(None)

    def stands(self, seconds: float) -> None:
        """Its loop makes no round for so long; all other threads go on."""
        for _ in range(int(seconds)):
            self.now += 1
            self.flight.stuck.tick()

    @property
    def told(self) -> dict[str, int]:
        """What counts as a finding, and makes an alert."""
        return self.recorder.status.findings_of("flight-recorder")

    def dumps(self):
        return [reading.read(p).finding for p in sorted(self.folder.glob("*.pt"))]


@pytest.fixture
def server(monkeypatch, tmp_path):
    return Server(monkeypatch, tmp_path / "dumps")


def test_a_real_hang_is_told_on_sigterm(server):
    server.flight.progress.step_begins()
    server.stands(19)
    server.flight.on_sigterm()
    assert server.told == {}
    server.stands(41)
    server.flight.on_sigterm()
    assert server.told == {"hang": 1}
    (found,) = server.dumps()
    assert "SIGTERM" in found.got
    assert "has been stuck for 60 s" in found.headline


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([*LOOP, "triton/runtime/jit.py:733 run", TRITON], "compiling kernels in triton/compiler/"),
        ([*LOOP, "torch/_dynamo/convert_frame.py:900 _compile", "x/y.py:1 f"], "torch/_dynamo/"),
        ([*LOOP, "torch/utils/cpp_extension.py:2400 _run_ninja_build", "subprocess.py:1 run"],
         "torch/utils/cpp_extension.py"),
        ([*LOOP, "flashinfer/jit/core.py:300 build_and_load"], "compiling kernels in flashinfer"),
        ([*LOOP, "tvm_ffi/cpp/extension.py:700 load_inline"], "compiling kernels in tvm_ffi"),
        ([*LOOP, "triton/runtime/autotuner.py:148 _bench", DEVICE], "compiling kernels"),
        ([*LOOP, "<frozen importlib._bootstrap>:1027 _find_and_load"], "importing a module"),
        ([*CONTROL, "sglang/srt/managers/weight_updater.py:9 update_weights_from_disk", "a.py:1 f"],
         "loading weights in sglang"),
        ([*CONTROL, "sglang/utils.py:1 __call__", "sglang/srt/managers/p.py:2 save_it", "a.py:1 f"],
         "carrying out a request to the server itself in sglang/srt/managers/p.py:2 save_it"),
    ],
)  # fmt: skip
def test_work_that_takes_minutes_is_no_hang(server, caplog, places, said):
    """On SIGTERM, and at 80 % of the watchdog's time, which it may survive."""
    server.at = places
    server.flight.progress.step_begins()
    server.stands(60)
    with caplog.at_level(logging.WARNING):
        server.flight.on_sigterm()
    assert server.told == {}
    (found,) = server.dumps()
    assert found.kind == "busy"
    assert "no hang is known: " in found.headline
    assert "the event loop has made no round for 60 s, before its first step; it " in found.headline
    assert said in found.headline
    assert "SIGTERM" in found.got
    assert [r.levelname for r in caplog.records if "no hang is known" in r.message] == ["WARNING"]
    server.round()
    server.stands(239)
    assert len(server.dumps()) == 1
    server.stands(20)
    assert [f.kind for f in server.dumps()] == ["busy", "busy"]
    assert server.told == {}


@pytest.mark.parametrize(
    "places",
    [
        # each is on the stack while what was compiled runs, or is over in a moment
        [*LOOP, "triton/runtime/jit.py:733 run", "triton/backends/nvidia/driver.py:9 __call__"],
        [*LOOP, "triton/compiler/compiler.py:400 _init_handles"],
        [*LOOP, "triton/runtime/autotuner.py:232 run", DEVICE],
        [*LOOP, "torch/_dynamo/eval_frame.py:700 _fn", "torch/_inductor/output_code.py:5 __call__"],
        [*LOOP, "torch/_inductor/codecache.py:9 __call__", DEVICE],
        [*LOOP, "flashinfer/autotuner.py:5 choose_one", DEVICE],
        [*LOOP, "torch/distributed/distributed_c10d.py:2800 all_reduce"],
        [*CONTROL, "sglang/srt/managers/scheduler.py:9 handle_generate_request", "a.py:1 f"],
        [LOOP[0], "sglang/srt/managers/scheduler.py:9 recv_requests", "torch/distributed/a.py:1 b"],
    ],
)  # fmt: skip
def test_what_only_looks_like_such_work_is_a_hang(server, places):
    server.at = places
    server.stands(60)
    server.flight.on_sigterm()
    assert server.told == {"hang": 1}


def test_a_compiler_that_was_started_without_a_frame_of_python(server):
    server.compilers = ["nvcc"]
    server.stands(60)
    server.flight.on_sigterm()
    assert server.told == {}
    assert "waiting for a compiler, as it seems: it has started nvcc" in server.dumps()[0].headline


def test_the_compilers_that_this_process_has_started():
    """Below a shell, as deep_gemm starts them."""
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        pytest.skip("this kernel does not tell the children of a process")
    rename = "import sys, time; open('/proc/self/comm', 'w').write('nvcc'); print(1, flush=True)"
    command = f'"{sys.executable}" -c "{rename}; time.sleep(600)"; true'
    shell = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    try:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "1\n"
        assert list(busy._compilers()) == ["nvcc"]
        (child,) = busy._children(shell.pid)
        os.kill(child, 9)
    finally:
        shell.kill()
        shell.wait()
    assert list(busy._compilers()) == []


def test_the_first_step_compiles_without_a_frame_of_python(monkeypatch, tmp_path):
    server = Server(monkeypatch, tmp_path / "dumps")
    server.flight.progress.returned = False
    server.flight.progress.step_begins()
    server.stands(60)
    server.flight.on_sigterm()
    assert server.told == {}
    assert "it was within its first step" in server.dumps()[0].headline


@pytest.mark.parametrize("seconds", [30, 3600])
def test_a_process_that_was_suspended_did_not_hang(server, seconds):
    """docker pause, then stop: SIGTERM comes in the same instant as SIGCONT."""
    server.now += seconds
    server.flight.on_sigterm()
    server.flight.stuck.tick()
    server.flight.on_sigterm()
    assert server.told == {}
    assert server.dumps() == []


def test_a_hang_that_was_suspended_in_between_is_one(server):
    server.stands(15)
    server.now += 3600
    server.stands(15)
    server.flight.on_sigterm()
    assert server.told == {"hang": 1}
    assert "has been stuck for 3" in server.dumps()[0].headline


def test_it_is_dumped_once_before_sglangs_watchdog_kills(monkeypatch, tmp_path):
    server = Server(monkeypatch, tmp_path / "dumps", watchdog_timeout=100)
    server.stands(79)
    assert server.told == {}
    server.stands(15)
    assert server.told == {"hang": 1}
    (found,) = server.dumps()
    assert "SGLang's watchdog kills it after 100 s" in found.got
    server.flight.on_sigterm()
    assert server.told == {"hang": 1}
    server.round()  # it goes on, and stands again
    server.stands(90)
    assert server.told == {"hang": 2}


def test_a_wait_for_the_device_is_told_after_hang_seconds(server):
    """Nobody compiles or loads there, no other rank is waited for, and no step was ever as long."""
    server.steps(5)
    server.launch()
    server.stands(19)
    assert server.told == {}
    server.stands(4)
    assert server.told == {"hang": 1}
    (found,) = server.dumps()
    assert "it has waited for the device in this place for 20 s" in found.got
    server.stands(300)
    server.flight.on_sigterm()
    assert server.told == {"hang": 1}  # once
    server.round()
    server.steps(1)
    server.launch()
    server.stands(30)
    assert server.told == {"hang": 1}  # that step took so long itself


def test_the_line_of_source_tells_that_a_tensor_is_fetched(server, monkeypatch, tmp_path):
    """As without overlap scheduling. Any other line of the scheduler tells nothing."""
    source = tmp_path / "sglang/srt/managers/processor.py"
    source.parent.mkdir(parents=True)
    source.write_text("next_token_ids = result.next_token_ids.tolist()\nfound = look(a.tolist())\n")
    module = SimpleNamespace(__file__=str(source))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.processor", module)
    for line, told in ((2, {}), (3, {}), (1, {"hang": 1})):
        server.at = [*LOOP, f"sglang/srt/managers/processor.py:{line} process_batch_result"]
        server.steps(5)
        server.launch()
        server.stands(100)
        assert server.told == told
        server.steps(20)


@pytest.mark.parametrize(
    "places",
    [
        [],
        LOOP,
        [LOOP[0]],
        [LOOP[0], DEVICE],  # not of a function of the scheduler
        [*LOOP, "torch/_ops.py:1000 __call__"],  # PTX may be compiled behind it
        [*LOOP, "torch/nn/functional.py:2000 linear"],
        [*LOOP, "sglang/srt/speculative/worker.py:9 verify", DEVICE],
        [*LOOP, "some/autotuner.py:9 bench", DEVICE],
        [*LOOP, "threading.py:350 wait"],
        [*LOOP, "torch/distributed/distributed_c10d.py:2800 all_reduce"],
        [*LOOP, TRITON],
        [*LOOP, "triton/runtime/autotuner.py:148 _bench", DEVICE],
    ],
)  # fmt: skip
def test_where_it_is_not_known_what_it_does_it_is_told_later(server, places):
    server.steps(5)
    server.launch()
    server.at = places
    server.stands(239)
    assert server.dumps() == []
    server.stands(2)
    assert len(server.dumps()) == 1


@pytest.mark.parametrize(
    "arguments",
    [{"tp_size": 2}, {"dp_size": 2}, {"pp_size": 2}, {"nnodes": 2}, {"enable_lmcache": True},
     {"enable_pdmux": True}],
)  # fmt: skip
def test_a_step_that_may_wait_for_others_is_told_later(monkeypatch, tmp_path, arguments):
    server = Server(monkeypatch, tmp_path / "dumps", **arguments)
    server.steps(5)
    server.launch()
    server.stands(239)
    assert server.dumps() == []
    server.stands(2)
    assert server.told == {"hang": 1}


@pytest.mark.parametrize("name", ["enable_hierarchical_cache", "enable_hisparse", "dllm_config"])
def test_a_step_that_may_wait_for_host_memory_is_told_later(server, name):
    setattr(server.has, name, True)
    server.steps(5)
    server.launch()
    server.stands(239)
    assert server.dumps() == []


@pytest.mark.parametrize(
    ("before", "step"),
    [
        ({"count": 2}, {}),  # its pace is not known yet
        ({"count": 50}, {"new": 8192}),  # no step was as large
        ({"count": 50}, {"context": 100_000}),
        ({"count": 50, "seconds": 25}, {}),  # under a debugger, or with weights in host memory
    ],
)
def test_a_step_that_may_take_so_long_is_told_later(server, before, step):
    server.steps(**before)
    server.launch(**step)
    server.stands(239)
    assert server.dumps() == []
    server.stands(2)
    assert server.told == {"hang": 1}


def test_ten_times_as_long_as_the_longest_step_of_its_size(server):
    server.steps(5, seconds=5)
    server.steps(50, new=4)  # others say nothing about it
    server.launch()
    server.stands(49)
    assert server.dumps() == []
    server.stands(6)
    assert server.told == {"hang": 1}


def test_of_a_step_that_decodes_its_requests_tell_the_size(server):
    server.steps(50, decodes=1)
    server.launch(decodes=4)
    server.stands(200)
    assert server.dumps() == []
    server.steps(5, decodes=4)
    server.steps(20, decodes=7)
    server.launch(decodes=5)
    server.stands(24)
    assert server.told == {"hang": 1}


def test_the_step_before_may_be_the_one_that_is_waited_for(server):
    """With overlap scheduling."""
    server.steps(50)
    server.steps(1, new=8192)
    server.launch()
    server.stands(239)
    assert server.dumps() == []


def test_a_wait_that_begins_behind_other_work_counts_from_its_own_begin(server):
    server.steps(5)
    server.launch()
    for at in ([*LOOP, "torch/_ops.py:1000 __call__"], [*LOOP, TRITON]):
        server.at = at
        server.stands(30)
    server.at = [*LOOP, DEVICE]
    server.compilers = ["nvcc"]
    server.stands(30)
    server.compilers = []
    server.stands(20)
    assert server.dumps() == []
    server.stands(2)
    assert server.told == {"hang": 1}


def test_a_process_that_may_have_been_suspended_is_told_later(server):
    server.steps(5)
    server.launch()
    server.stands(10)
    server.now += 3600
    server.stands(200)
    assert server.dumps() == []


@pytest.mark.parametrize("arguments", [{"watchdog_timeout": None}, {"watchdog_timeout": 10**6}])
@pytest.mark.parametrize("compiles", [True, False])
def test_without_a_watchdog_it_is_told_after_300_seconds(
    monkeypatch, tmp_path, arguments, compiles
):
    server = Server(monkeypatch, tmp_path / "dumps", **arguments)
    server.at = [*LOOP, TRITON] if compiles else server.at
    server.stands(299)
    assert server.dumps() == []
    server.stands(30)
    (found,) = server.dumps()
    assert server.told == ({} if compiles else {"hang": 1})
    assert "it has stood for 300 s, and no watchdog told it" in found.got


@pytest.mark.parametrize("name", ["cur_batch", "cur_batch_for_debug"])
def test_sglangs_watchdog_does_not_look_while_there_is_no_batch(server, name):
    """Weights are loaded on an idle server, for as long as that takes."""
    setattr(server.has, name, None)
    server.stands(299)
    assert server.dumps() == []
    server.stands(2)
    assert server.told == {"hang": 1}


def test_a_rank_that_waits_for_another_one_which_compiles_does_not_hang(server):
    others = PeerRanks()
    others.make("L")
    others.join("L")
    others.name_ranks(0, 1, 0)
    other = LaunchMemory(os.dup(others.memory.fd))
    try:
        other.mine = 3
        for replica, kind in ((1, "hang"), (0, "busy")):  # of data parallelism; and its own
            server.round()
            other.claim()
            other.name_ranks(replica, 0, 0)
            other.say_busy(True)
            server.flight.stuck.others = server.context.trap.others = others
            server.stands(60)
            server.flight.on_sigterm()
            assert server.dumps()[-1].kind == kind
        assert "maybe waiting for rank dp0/tp0/pp0, which" in server.dumps()[-1].headline
        other.say_busy(False)
        server.round()
        server.stands(60)
        server.flight.on_sigterm()
        assert server.dumps()[-1].kind == "hang"
        mine = others.memory.mine
        server.at = [*LOOP, TRITON]
        server.stands(1)
        assert other.seat(mine).busy
        server.round()
        server.stands(1)
        assert not other.seat(mine).busy
        assert other.seat(mine).tp == 1
    finally:
        other.close()
        others.close()


def test_the_ticks_come_in_a_thread_of_their_own_and_end(server):
    came = threading.Event()
    server.flight.ticks.on_tick, server.flight.ticks.seconds = came.set, 0.01
    server.flight.ticks.start()
    assert came.wait(60)
    server.flight.ticks.stop()


def test_where_no_thread_can_be_started_that_is_said(server, monkeypatch):
    def none() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(server.flight.ticks, "start", none)
    monkeypatch.setattr(server.flight.watch, "start", lambda: None)
    server.flight.before_event_loop()
    (limit,) = server.context.status.record().limits
    assert limit.what == "a loop that stands is not told"
