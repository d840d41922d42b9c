"""One group of healthy workloads on one engine, in a process of its own.

``python repro/_healthy_variant.py GROUP RESULT.json``. What the engine's processes print must go
to RESULT.log. The result has, for each workload, its outputs, its requests, what happened, what
the tracers checked, and why the workload does not count if it does not.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from _run import end_with_the_script

IDLE_SECONDS = 0.5  # between two workloads: at idle, everything is counted and compared
LIMIT = 240.0  # seconds that one workload may take


def main() -> None:
    end_with_the_script()
    name, result = sys.argv[1], Path(sys.argv[2])
    from _healthy import counts
    from _healthy.engine import running
    from _healthy.groups import group_of
    from _healthy.workload import Client, NotExercised

    group = group_of(name)

    def arguments() -> dict[str, Any]:
        more = group.prepare(result.parent) if group.prepare is not None else {}
        return {"decode_log_interval": 1, **group.engine, **more}

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


if __name__ == "__main__":  # spawned children import this module, too
    main()
