"""A child: one server that was drawn at random.

The result has how many requests were sent, and the status of the tracers at the end.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from harness.engine import running
from harness.replays import keep_tape
from harness.tracers import of_one_rank

from suites.fuzz.draw import draw, drive
from suites.healthy.workload import Client

IDLE_SECONDS = 1.0  # at the end: when nothing runs, everything is counted


def main(device: str, result: Path, seed: int, model: str) -> None:
    from g4debug.cpu.server import engine_arguments

    shape = draw(seed, model)
    logs = {"model": model, "log_level": "info", "decode_log_interval": 20}
    draft = {"draft": shape.draft} if shape.draft else {}
    with running(engine_arguments(shape.mtp, **logs, **draft, **shape.engine)) as engine:
        client = Client(engine, f"fuzz-{seed}", result.with_suffix(".log"))
        engine.loop.run_until_complete(drive(client, shape, seed))
        time.sleep(IDLE_SECONDS)
        told = {"requests": client.requests, "facts": client.facts, "status": of_one_rank()}
        if told["status"]:
            keep_tape(result.parent)
        result.write_text(json.dumps(told))
