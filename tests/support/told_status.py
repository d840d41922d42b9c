"""What each tracer of a real engine says of itself: a driver prints it, and its test reads it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import Any

from g4debug.cli._running import look

LINE = "STATUS "


def tell() -> None:
    """Print the tracers of this process's engine, as ``doctor --pid`` sees them."""
    time.sleep(2.5)  # a status is told once in a second
    for scheduler in look(os.getpid()).schedulers:
        print(LINE + json.dumps([asdict(t) for t in scheduler.tracers]), flush=True)


def read(log: str) -> dict[str, dict[str, Any]]:
    """Tracer -> its fields, of the only scheduler."""
    (told,) = of_each(log)
    return told


def of_each(log: str) -> list[dict[str, dict[str, Any]]]:
    """The same of each scheduler: of each rank."""
    lines = (x.removeprefix(LINE) for x in log.splitlines() if x.startswith(LINE))
    return [{t["name"]: t for t in json.loads(line) if t["mode"]} for line in lines]


def blind(tracer: dict[str, Any]) -> bool:
    """True if it has judged nothing, and does not say that there is nothing to judge."""
    idle = tracer["off"] and tracer["off"] == tracer["nothing"]
    counted = sum(c["count"] for c in tracer["checked"] if c["what"] != "steps")
    return not idle and (bool(tracer["off"]) or not counted)


def limits(tracers: dict[str, dict[str, Any]]) -> dict[str, set[str]]:
    """What is not judged, by tracer."""
    found = {n: {x["what"] for x in t["limits"]} for n, t in tracers.items()}
    return {name: limits for name, limits in found.items() if limits}
