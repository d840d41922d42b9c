"""Brings what the tracers have checked out of the scheduler's process.

The scheduler runs in a process of its own, and g4debug's status is there. A thread in that process
writes it into a file, again and again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "REPRO_HEALTHY_COUNTS"  # where the thread writes
PERIOD = 0.2  # seconds between two looks
Counts = dict[str, dict[str, int]]  # tracer -> what was checked -> how often


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """In place of SGLang's function of this name: the same, and a thread that publishes."""
    from sglang.srt.managers.scheduler import run_scheduler_process as real

    target = os.environ.get(VARIABLE)
    if target:
        threading.Thread(target=_publish, args=(Path(target),), daemon=True).start()
    real(*args, **kwargs)


def _publish(target: Path) -> None:
    from g4debug import plugin

    aside = target.with_suffix(".new")
    while True:
        time.sleep(PERIOD)
        in_force = plugin.in_force
        if in_force is None:
            continue
        try:
            status: Any = getattr(in_force.recorder, "status", None)
            records = [dataclasses.asdict(r) for r in status.records()] if status else []
        except RuntimeError:
            continue  # a dictionary grew while it was read: look again
        aside.write_text(json.dumps({"at": time.time(), "records": records}))
        aside.replace(target)


def latest(target: Path, patience: float = 10.0) -> list[dict[str, Any]]:
    """The status of the scheduler's process, not older than this call; [] without tracers."""
    asked, end = time.time(), time.monotonic() + patience
    while time.monotonic() < end:
        if target.is_file():
            found = json.loads(target.read_text())
            if found["at"] > asked:
                return list(found["records"])
        time.sleep(PERIOD / 2)
    return []


def counts(records: list[dict[str, Any]]) -> Counts:
    """What each tracer had checked."""
    return {r["name"]: {c["what"]: int(c["count"]) for c in r["checked"]} for r in records}


def grown(before: Mapping[str, Mapping[str, int]], after: Counts) -> Counts:
    """What was checked in between."""
    return {
        name: {what: n - before.get(name, {}).get(what, 0) for what, n in tallies.items()}
        for name, tallies in after.items()
    }
