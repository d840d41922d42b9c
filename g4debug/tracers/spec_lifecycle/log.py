"""Keeps the last hand-overs of ``batch.spec_info``, and reports one that is wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from g4debug.findings.record import Evidence, Finding, Transition
from g4debug.findings.status import Tally
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.check import Violation
from g4debug.tracers.spec_lifecycle.hand_over import HandOver
from g4debug.tracers.spec_lifecycle.report import describe
from g4debug.tracers.spec_lifecycle.spec_info import state_of

HISTORY = 32  # hand-overs that are remembered
_LABELS = {
    "worker.seed_step": "seed",
    "worker.forward": "end",
    "result.resolve": "result",
    "forward_batch.init_new": "forward",
}
MOST_LENGTHS = 8  # accepted lengths that a note names


class Accepted(NamedTuple):
    """The note of a verify. It becomes words only if somebody reads it.

    lengths: the accept length of each request. finished: how many requests ended. step: the step
    that it was, where that is not clear.
    """

    lengths: Sequence[int]
    finished: int = 0
    step: int = -1

    def __str__(self) -> str:
        step = f"of step {self.step}: " if self.step >= 0 else ""
        more = ", …" if len(self.lengths) > MOST_LENGTHS else ""
        finished = f", {self.finished} finished" if self.finished else ""
        return f"{step}accepted {', '.join(map(str, self.lengths[:MOST_LENGTHS]))}{more}{finished}"


class History:
    """The last hand-overs of all batches in this process."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, str, str, str, int, object]] = deque(maxlen=HISTORY)

    def add(
        self, step: int, site: str, before: str, after: str, requests: int, note: object = ""
    ) -> None:
        self._seen.append((step, site, before, after, requests, note))

    def transitions(self, *last: Transition) -> tuple[Transition, ...]:
        """The hand-overs, oldest first, and then ``last``."""
        seen = ((*hand_over[:-1], str(hand_over[-1])) for hand_over in self._seen)
        return (*(Transition(*hand_over) for hand_over in seen), *last)


class SpecLog:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.history = History()
        self.mute = False  # the worker was never run here, so nothing is judged
        self._judged: Tally | None = None

    def note(self, site: str, before: str, after: str, requests: int, note: object = "") -> None:
        """Note one hand-over that went well."""
        self.history.add(self.context.recorder.step, site, before, after, requests, note)

    def judge(
        self,
        site: str,
        batch: Any,
        violation: Violation | None,
        rids: list[str] | None = None,
        note: object = "",
        step: int = 0,
    ) -> None:
        """Report ``violation``, if there is one. Raises TrapError in raise mode.

        step: the step that it belongs to, 0 for the one that began last.
        """
        if self.mute:
            return
        judged = self._judged
        if judged is None:
            judged = self._judged = self.context.status.tally("hand-overs")
        judged.count += 1
        judged.step = self.context.recorder.step
        if violation is None:
            return
        label = _LABELS.get(site, site.rpartition(".")[2].replace("_", "-"))
        if rids is None:
            rids = [str(r.rid) for r in getattr(batch, "reqs", ())]
        at = HandOver(site, label, batch, tuple(rids), step)
        state = state_of(getattr(batch, "spec_info", None)) if batch is not None else ""
        said = f"expected {violation.expected}, got {violation.got}"
        last = Transition(
            step=step or self.context.recorder.step,
            site=label,
            before=state,
            after=state,
            requests=len(rids) if rids else -1,
            note=f"{note}: {said}" if note else said,
            ok=False,
        )

        def make() -> tuple[Finding, Evidence]:
            finding = self.describe(violation, at)
            return finding, Evidence(transitions=self.history.transitions(last))

        self.context.trap.report(*self.context.described(violation.kind, site, said, make))

    def describe(self, violation: Violation, at: HandOver) -> Finding:
        """The finding, in words."""
        return describe(violation, at, self.context.recorder)
