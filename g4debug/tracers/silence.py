"""Says of a tracer that it is armed and judges nothing, whatever the reason.

A hook that is gone is found (:mod:`g4debug.tracers.hook_watch`), and a tracer says itself what it
does not judge on a server. What neither knows of is a way through SGLang that passes a tracer's
hooks by: a new release, a backend inside a backend, a forward that nobody has seen. There a tracer
is armed, finds nothing, and would never find anything. But each tracer counts what it judges. So
this looks after every step in which of them no count has grown, and tells after ``STEPS`` such
steps. It is one line of the log, and stands in the status and in every dump until it judges again.

A tracer that looks at each forward is asked for each mode of a batch apart: one that judges every
decode may be blind in every prefill. Healthy silence is none: a server without work makes no
steps, a replay of a CUDA graph with a captured check is judged, and a tracer that has nothing to
judge says so (``Part.rests``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from g4debug.findings.status import Part
from g4debug.findings.steps import Recorder
from g4debug.tracers.base import Context, Tracer

STEPS = 1000  # steps with work, in a row, in which nothing was judged
CAPTURED = "captured in CUDA graphs"  # ends the name of a tally that grows when a graph is made
# A tally that only shows that a tracer was called, and not that there was something to judge.
CALLED = "steps"


class Silence:
    """steps: (tracer, mode) -> how many steps in a row were silent, and the first of them."""

    def __init__(self, recorder: Recorder, tracers: Iterable[Tracer]) -> None:
        self.recorder = recorder
        self.tracers = [t for t in tracers if t.judges]
        self.steps: dict[tuple[str, str], tuple[int, int]] = {}
        self._counts: dict[str, int] = {}

    def install(self, context: Context) -> None:
        context.after("scheduler.run_batch", self.after_step)

    def after_step(self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode
        if not batch.reqs or mode is None or mode.is_idle():
            return result
        replayed = bool(getattr(result, "can_run_cuda_graph", False))
        for tracer in self.tracers:
            part = self.recorder.status.part(tracer.id)
            self._look(part, mode.name if tracer.each_forward else "", replayed)
        return result

    def _look(self, part: Part, mode: str, replayed: bool) -> None:
        total = captured = 0
        for what, tally in part.tallies.items():
            if what != CALLED:
                total += tally.count
                captured += tally.count if what.endswith(CAPTURED) else 0
        grown = total != self._counts.get(part.name, 0)
        self._counts[part.name] = total
        key = part.name, mode
        if grown or (replayed and captured):
            if self.steps.pop(key, (0, 0))[0] >= STEPS:
                part.heard(mode)
            return
        silent, first = self.steps.get(key, (0, self.recorder.step))
        self.steps[key] = silent + 1, first
        if silent + 1 < STEPS or (silent + 1) % STEPS or part.is_off:
            return
        if part.rests():
            return
        part.silent(mode, first, STEPS)
