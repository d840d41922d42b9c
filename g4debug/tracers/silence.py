"""Says of a tracer that it is armed and judges nothing, whatever the reason.

A hook that is gone is found (:mod:`g4debug.tracers.hook_watch`), and a tracer says itself what it
does not judge on a server. What neither knows of is a way through SGLang that passes a tracer's
hooks by: a new release, a backend inside a backend, a forward that nobody has seen. There a tracer
is armed, finds nothing, and would never find anything. But each tracer counts what it judges. So
this looks after every step in which of them no count has grown, and tells after ``STEPS`` such
steps. It is one line of the log, and stands in the status and in every dump until it judges again.

A tracer that looks at each forward is asked for each mode of a batch apart: one that judges every
decode may be blind in every prefill. A count that a tracer calls ``steady`` is asked for by itself,
in each mode in which it has ever grown: the others may go on without it. Healthy silence is none: a
server without work makes no steps, a replay of a CUDA graph with a captured check is judged (of a
prefill, if the graph of a prefill has one), and a tracer that has nothing to judge in a step says
so (``Part.rests``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from g4debug.findings.status import Part
from g4debug.findings.steps import Recorder
from g4debug.tracers.base import Context, Tracer

STEPS = 1000  # steps with work, in a row, in which nothing was judged
CAPTURED = "captured in CUDA graphs"  # ends the name of a tally that grows when a graph is made
# The modes of batches that replay the graphs of a prefill. SGLang captures these apart, so a check
# in the graphs of a decode says nothing of them.
PREFILLS = frozenset(("EXTEND", "MIXED", "SPLIT_PREFILL"))
# A tally that only shows that a tracer was called, and not that there was something to judge.
CALLED = "steps"


class Silence:
    """steps: (tracer, count, mode) -> how many steps in a row were silent, and the first of them.

    count: the name of one that is steady, '' for all of them together.
    """

    def __init__(self, recorder: Recorder, tracers: Iterable[Tracer]) -> None:
        self.recorder = recorder
        self.tracers = [t for t in tracers if t.judges]
        self.steps: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def install(self, context: Context) -> None:
        context.after("scheduler.run_batch", self.after_step)

    def after_step(self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode
        if not batch.reqs or mode is None or mode.is_idle():
            return result
        replayed = bool(getattr(result, "can_run_cuda_graph", False))
        for tracer in self.tracers:
            part = self.recorder.status.part(tracer.id)
            self._look(part, mode.name, replayed, tracer.each_forward)
            for what in tracer.steady:
                self._look_at(part, mode.name, what)
        return result

    def _look(self, part: Part, mode: str, replayed: bool, each_forward: bool) -> None:
        total = captured = 0
        for what, tally in part.tallies.items():
            if what != CALLED:
                total += tally.count
                captured += tally.count if what.endswith(CAPTURED) else 0
        if mode in PREFILLS and each_forward and not part.captured & PREFILLS:
            captured = 0
        grown = self._has_grown(part, "", total)
        key = part.name, "", mode if each_forward else ""
        if grown or (replayed and captured):
            if self.steps.pop(key, (0, 0))[0] >= STEPS:
                part.heard(key[2])
            return
        self._count(part, key, mode)

    def _look_at(self, part: Part, mode: str, what: str) -> None:
        """One count, in a mode in which it has grown before."""
        tally, key = part.tallies.get(what), (part.name, what, mode)
        if tally is not None and self._has_grown(part, what, tally.count):
            if self.steps.get(key, (0, 0))[0] >= STEPS:
                part.heard(mode, what)
            self.steps[key] = 0, 0
        elif key in self.steps:
            self._count(part, key, mode)

    def _has_grown(self, part: Part, what: str, count: int) -> bool:
        before, self._counts[part.name, what] = self._counts.get((part.name, what), 0), count
        return count != before

    def _count(self, part: Part, key: tuple[str, str, str], mode: str) -> None:
        """A step of this mode was silent."""
        silent, first = self.steps.get(key, (0, 0))
        self.steps[key] = silent + 1, first if silent else self.recorder.step
        if (silent + 1) % STEPS or part.is_off or part.rests(mode):
            return
        part.silent(key[2], self.steps[key][1], STEPS, key[1])
