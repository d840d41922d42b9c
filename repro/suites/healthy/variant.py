"""A child: one group of healthy workloads on one engine.

The result has, for each workload, its outputs, its requests, what happened, what the tracers
checked, and why the workload does not count if it does not.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from harness.engine import running
from harness.replays import keep_tape
from harness.tracers import of_ranks

from suites.healthy.groups import group_of
from suites.healthy.run import Counts, counts, fewest
from suites.healthy.workload import Client, NotExercised

IDLE_SECONDS = 0.5  # between two workloads: at idle, everything is counted and compared
LIMIT = 240.0  # seconds that one workload may take


def made(after: Counts, before: Counts) -> Counts:
    """How often each tracer of a scheduler has checked something since ``before``."""
    return {
        tracer: {what: n - before.get(tracer, {}).get(what, 0) for what, n in it.items()}
        for tracer, it in after.items()
    }


def main(device: str, result: Path, name: str, model: str) -> None:
    from g4debug.cpu.server import engine_arguments

    group = group_of(name, model)
    more = group.prepare(result.parent, model) if group.prepare is not None else {}
    logs = {"model": model, "log_level": "info", "decode_log_interval": 1}
    found: dict[str, Any] = {}
    with running(engine_arguments(group.mtp, **{**logs, **group.engine, **more})) as engine:
        after = {title: counts(records) for title, records in of_ranks().items()}
        for workload in group.workloads:
            print(f"g4debug-repro: {workload.id}", flush=True)
            client, problem = Client(engine, workload.id, result.with_suffix(".log")), ""
            begin = time.perf_counter()
            try:
                engine.loop.run_until_complete(asyncio.wait_for(workload.drive(client), LIMIT))
            except NotExercised as e:
                problem = str(e)
            except TimeoutError:
                problem = f"it was not done after {LIMIT:.0f} s"
            seconds = time.perf_counter() - begin
            time.sleep(IDLE_SECONDS)
            ranks, before = of_ranks(), after
            after = {title: counts(records) for title, records in ranks.items()}
            found[workload.id] = {
                "outputs": client.outputs,
                "requests": client.requests,
                "facts": client.facts,
                "problem": problem,
                "s": round(seconds, 1),
                "checked": fewest(made(n, before.get(title, {})) for title, n in after.items()),
                "status": [record for records in ranks.values() for record in records],
                "ranks": len(ranks),
            }
            # After each: if the engine dies later, what was done before is still known.
            result.write_text(json.dumps(found))
        if after:
            keep_tape(result.parent)
    print("g4debug-repro: completed", flush=True)
