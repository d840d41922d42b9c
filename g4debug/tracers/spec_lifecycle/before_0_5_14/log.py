"""The hand-overs of the v1 worker, and the words of a finding about one."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

from g4debug.findings.kinds import ARMED, EAGER, KINDS, LAUNCH
from g4debug.findings.record import Finding
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle import causes
from g4debug.tracers.spec_lifecycle.check import Violation
from g4debug.tracers.spec_lifecycle.hand_over import HandOver
from g4debug.tracers.spec_lifecycle.log import SpecLog
from g4debug.tracers.spec_lifecycle.report import DOUBLE

_MOST_LEFT = 64


@dataclass(frozen=True)
class Left:
    """A verify input that a worker's forward left behind: harmless until the batch goes on."""

    step: int
    requests: int
    live: int  # how many of them had not finished


class V1Log(SpecLog):
    """The hand-overs of a worker that may leave a verify input behind.

    repairing: fix spec-batch-guards is in force. A state that it repairs is a finding nevertheless,
    because something else must have gone wrong before. The fix only mentions it in the log.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.repairing = "spec-batch-guards" in context.hooks.owners("batch.merge")
        self._left: dict[int, tuple[weakref.ref[Any], Left]] = {}  # by id() of a spec_info

    def leave(self, spec: Any, requests: int, live: int) -> None:
        """Note that a forward ended with ``spec`` on the batch, which is not a draft input."""
        if len(self._left) >= _MOST_LEFT:
            self._left = {k: v for k, v in self._left.items() if v[0]() is not None}
        left = Left(self.context.recorder.step, requests, live)
        self._left[id(spec)] = (weakref.ref(spec), left)

    def describe(self, violation: Violation, at: HandOver) -> Finding:
        spec = getattr(at.batch, "spec_info", None)
        ref, left = self._left.get(id(spec), (None, None))
        if ref is None or ref() is not spec:
            left = None
        finding = super().describe(violation, at)
        if at.site in ("draft.bind_embedding", "attn.hybrid_metadata"):
            return finding  # of the draft, and not of a step: the same in every release
        fix, command = explain(violation, left, self.repairing)
        reference = fix + KINDS["spec-lifecycle"][violation.kind].reference
        why = cause(violation, at, left)
        return replace(finding, cause=why, reference=reference, next_command=command)


def explain(violation: Violation, left: Left | None, repairing: bool) -> tuple[str, str]:
    """(the fix that matches, as a prefix of the reference, next command)."""
    kind = violation.kind
    if kind == "verify-input-left" and left is not None and left.live == 0:
        return (
            "fix idle-draft-input (in sglang 0.5.13); ",
            f"G4DEBUG_FIX_IDLE_DRAFT_INPUT=1 {LAUNCH}",
        )
    if kind == "spec-info-dropped":
        # The fix repairs this at a merge only, because a batch without it may not have run yet.
        return "", "g4debug doctor"
    if KINDS["spec-lifecycle"][kind].fix == "spec-batch-guards":
        # If the fix is in force, it repairs such a batch, and serving can go on in log mode.
        switch = "G4DEBUG_MODE=log" if repairing else "G4DEBUG_FIX_SPEC_BATCH_GUARDS=1"
        return "fix spec-batch-guards (a batch without live requests); ", f"{switch} {ARMED}"
    if kind == "bookkeeping":
        return DOUBLE, f"{LAUNCH} --disable-overlap-schedule"
    return "", EAGER


def cause(violation: Violation, at: HandOver, left: Left | None) -> str:
    """The likely cause, in words."""
    if violation.kind == "verify-input-left":
        return _left(left)
    if violation.kind == "spec-info-dropped":
        return f"{causes.lost(at)}. SGLang's next line would be an assertion in draft"
    if violation.kind == "bookkeeping":
        return _counted(violation)
    return causes.cause(violation, at)


def _left(left: Left | None) -> str:
    if left is None:
        return causes.NOBODY_LEFT_IT
    if left.live == 0:
        return (
            f"every request of the batch ({left.requests}) finished in the verify of step "
            f"{left.step}; the worker replaces the verify input by a draft input only if a "
            "request goes on, and the batch was not filtered since then, because a waiting request "
            "was prefilled first. SGLang's next line would be an AttributeError in merge_batch"
        )
    return (
        f"the worker's forward of step {left.step} ended with its verify input still on the batch, "
        f"although {left.live} of {left.requests} requests go on: the seed step did not run, or "
        "its draft input was overwritten; which of the two is not known" + causes.HISTORY
    )


def _counted(violation: Violation) -> str:
    both = (
        "the v1 verify (eagle_info.py) and the v2 result processing "
        "(scheduler_output_processor_mixin.py)"
    )
    must = "; exactly one of them must do so, once in each step"
    if violation.off > 0:
        return f"{violation.what} was advanced more than once: both {both} can advance it{must}"
    if violation.off < 0:
        return (
            f"{violation.what} was advanced too little: neither of {both} counted all accepted "
            f"tokens{must}"
        )
    return f"not known: {violation.what} can be advanced by {both}{must}"
