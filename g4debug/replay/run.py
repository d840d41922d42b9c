"""Replays a dump, from its record to the result that is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from g4debug.findings.record import TrapRecord
from g4debug.replay import host, setting, verdict
from g4debug.replay.setting import CannotReplay
from g4debug.reporters.replay import Replayed


def replayed(
    dump: Path,
    record: TrapRecord,
    trace: tuple[str, ...],
    seconds: float,
    folder: Path,
    progress: Callable[[int, int], None],
) -> Replayed:
    """trace: the tracers to arm, () for those that were armed there."""
    try:
        on, recording = setting.recording_of(record)
        made = setting.setting_of(record, on, recording)
        armed = trace or setting.tracers_of(record)

        def told(steps: int) -> None:
            progress(steps, recording.steps)

        with host.started(dump, made, armed, folder, told) as running:
            outcome = running.run(on.page, on.firsts, seconds, told, None)
    except CannotReplay as e:
        return Replayed(verdict.NOTHING, f"cannot be replayed, because {e}")
    judged = verdict.judge(record, on, recording, outcome)
    states = judged.states
    return Replayed(
        code=judged.code,
        text=judged.text,
        more=judged.more,
        notes=tuple(made.notes),
        release=made.release,
        requests=len(recording.requests),
        steps=recording.steps,
        equal=-1 if states is None else states.equal,
        pages_compared=-1 if states is None else states.pages,
        differs=0 if states is None else states.differs,
        begins=on.begins,
        seconds=outcome.seconds,
        faults=made.environ.get("G4DEBUG_FAULTS", ""),
    )
