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

from suites.healthy import counts
from suites.healthy.engine import running
from suites.healthy.groups import group_of
from suites.healthy.workload import Client, NotExercised

IDLE_SECONDS = 0.5  # between two workloads: at idle, everything is counted and compared
LIMIT = 240.0  # seconds that one workload may take


def main(device: str, result: Path, name: str) -> None:
    group = group_of(name)
    more = group.prepare(result.parent) if group.prepare is not None else {}
    arguments = {"decode_log_interval": 1, **group.engine, **more}
    found: dict[str, Any] = {}
    with running(result, group.mtp, arguments) as (engine, status):
        for workload in group.workloads:
            print(f"g4debug-repro: {workload.id}", flush=True)
            before = counts.counts(status())
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
            records = status()
            found[workload.id] = {
                "outputs": client.outputs,
                "requests": client.requests,
                "facts": client.facts,
                "problem": problem,
                "s": round(seconds, 1),
                "checked": counts.grown(before, counts.counts(records)),
                "status": records,
            }
            # After each: if the engine dies later, what was done before is still known.
            result.write_text(json.dumps(found))
    print("g4debug-repro: completed", flush=True)
