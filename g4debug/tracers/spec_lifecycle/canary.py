"""Proves that the spec-lifecycle tracer works: it must catch a fault in an invented step.

The tracer, the fault, the trap and the dump are the real ones. The requests, the batch, the
FutureMap and the ``spec_info`` objects are SGLang's, too; where SGLang cannot be imported, an older
canary with stand-ins for them takes over, if there is one. No server is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from g4debug.faults import verify_input_left
from g4debug.faults.base import Injection
from g4debug.findings.record import TrapRecord
from g4debug.hooking.older import older_module
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.canary import found, must_have_fired, once, sound
from g4debug.tracers.spec_lifecycle.rehearsal import Classes, Rehearsal
from g4debug.tracers.spec_lifecycle.tracer import SpecLifecycle

FAULT = verify_input_left.FAULT
LENGTHS = (130, 1, 512)
ACCEPTED = (1, 4, 2)  # accepted tokens of each request, including the bonus token


def fire(folder: Path, device: torch.device) -> str:
    """Fire the fault, expect the finding and a dump in ``folder``. Returns what was seen."""
    older, why = older_module(__name__), ""
    if older is None:
        try:
            return rehearse(folder, Classes(), device)
        except ImportError as e:
            older = older_module(__name__, here=False)
            why = f"SGLang's v2 cannot be imported here: {e}"
    if older is None:
        raise CanaryError(why)
    return str(older.fire(folder, device)) + (f", because {why}" if why else "")


def rehearse(folder: Path, classes: Classes, device: torch.device) -> str:
    """Three sound steps with SGLang's own classes, and one with the fault."""
    context = Context.alone("spec-lifecycle", Settings(debug=True, debug_dir=folder))
    tracer, recorder = SpecLifecycle(context), context.recorder
    hooked = {name: (before, after) for name, before, after in tracer.hooks()}
    left: list[Injection] = []
    made: list[Any] = [None]

    def site(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        before, after = hooked.get(name, (None, None))

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = function(*args, **kwargs)
            if name == "worker.draft":
                made[0] = result
            if name == "scheduler.run_batch" and left:
                verify_input_left.leave(args[1], made[0], left[0])
            return result if after is None else after(result, *args, **kwargs)

        return call

    rehearsal = Rehearsal(site, classes, device)
    batch = rehearsal.batch(
        *(rehearsal.request(f"canary-{i}", i + 1, n) for i, n in enumerate(LENGTHS))
    )
    with sound("a sound step"):
        recorder.count()
        rehearsal.prefill(batch)
        for _ in range(2):
            recorder.count()
            rehearsal.process(*rehearsal.run(batch, ACCEPTED))
    left.append(once(FAULT))
    recorder.count()

    def wrong_step() -> None:
        rehearsal.run(batch, ACCEPTED)
        must_have_fired(left[0])

    record = found(wrong_step, f"the fault {FAULT.id}")
    return read_back(record, "run-batch") + ", of a step of speculative decoding v2"


def read_back(record: TrapRecord, where: str) -> str:
    """Compare the finding and its dump with what was done. where: the last hand-over's name."""
    if record.finding.kind != "verify-input-left":
        raise CanaryError(f"something else was found: {record.finding.headline}")
    last = record.transitions[-1] if record.transitions else None
    if last is None or last.ok or (last.site, last.after) != (where, "verify-input"):
        raise CanaryError(
            "it was found, but the dump's history does not end with the wrong hand-over"
        )
    return f"found the verify input that was left; {len(record.transitions)} hand-overs read back"
