"""A scheduler whose event loop turns, made of stand-ins, with a flight recorder on it."""

from __future__ import annotations

from types import SimpleNamespace

from g4debug.dumps import reading
from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import progress as progress_module
from g4debug.tracers.flight_recorder import running_clock
from g4debug.tracers.flight_recorder import standing as standing_module
from g4debug.tracers.flight_recorder.tracer import FlightRecorder
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap

LIMIT, STEPS = 20, 100
EMPTY = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True))


class Request:
    def __init__(self, rid: str, done: int = 0) -> None:
        self.rid, self.kv_committed_len, self.output_ids = rid, done, []
        self.finished_reason: str | None = None

    def finished(self) -> bool:
        return self.finished_reason is not None


class Server:
    """A scheduler that turns: what it has, and its rounds. mode: of g4debug."""

    def __init__(self, monkeypatch, folder, mode: str = "raise", **settings) -> None:
        self.now, self.busy = 1000.0, 0.0  # seconds; busy: of this thread
        fake = SimpleNamespace(monotonic=lambda: self.now, thread_time=lambda: self.busy)
        for module in (progress_module, standing_module, running_clock):
            monkeypatch.setattr(module, "time", fake)
        settings = Settings(
            debug=True, mode=mode, debug_dir=folder, starved_steps=STEPS, hang_seconds=LIMIT,
            **settings,
        )  # fmt: skip
        self.recorder = Recorder(4)
        trap = Trap(settings, Describer(self.recorder), self.recorder.status)
        self.context = Context("flight-recorder", Hooks(), settings, self.recorder, trap)
        self.flight = FlightRecorder(self.context)
        self.folder = folder
        self.has = SimpleNamespace(
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[]),
            chunked_req=None,
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            _engine_paused=False,
            forward_ct=0,
        )
        self.recorder.attach(self.has)

    def turn(self, seconds: float, each: float = 0.5) -> None:
        """Rounds without a step."""
        for _ in range(int(seconds / each)):
            self.now += each
            self.flight.progress.came_round()
            self.flight.look()

    def step(self, seconds: float = 0.3, *served: Request) -> None:
        """A round with a step, which computes a token of each of these requests."""
        self.flight.progress.came_round()
        self.flight.look()
        self.recorder.step += 1
        self.has.forward_ct += 1
        self.flight.progress.step_begins()
        self.now += seconds
        for request in served:
            request.kv_committed_len += 1
        self.flight.progress.step_ends(None)

    def empty_step(self, seconds: float = 0.3) -> None:
        """A round with a batch of nobody, which a rank runs because others have requests."""
        self.flight.progress.came_round()
        self.flight.look()
        self.recorder.step += 1
        self.has.forward_ct += 1
        self.flight.progress.step_begins(self.has, batch=EMPTY)
        self.now += seconds
        self.flight.progress.step_ends(None)

    @property
    def told(self) -> list[str]:
        return [
            f"{kind}: {n}"
            for kind, n in self.recorder.status.findings_of("flight-recorder").items()
        ]

    def findings(self):
        return [reading.read(p).finding for p in sorted(self.folder.glob("*.pt"))]
