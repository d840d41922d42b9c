"""A child: one server that was drawn at random.

The result has how many requests were sent, and the status of the tracers at the end.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from suites.fuzz.draw import draw, drive
from suites.healthy.engine import running
from suites.healthy.workload import Client

IDLE_SECONDS = 1.0  # at the end: when nothing runs, everything is counted


def main(device: str, result: Path, seed: int) -> None:
    shape = draw(seed)
    with running(result, shape.mtp, {"decode_log_interval": 20, **shape.engine}) as started:
        engine, status = started
        client = Client(engine, f"fuzz-{seed}", result.with_suffix(".log"))
        engine.loop.run_until_complete(drive(client, shape, seed))
        time.sleep(IDLE_SECONDS)
        told = {"requests": client.requests, "facts": client.facts, "status": status()}
        result.write_text(json.dumps(told))
