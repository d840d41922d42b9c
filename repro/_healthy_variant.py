"""One group of healthy workloads on one engine, in a process of its own.

``python repro/_healthy_variant.py GROUP RESULT.json``. What the engine's processes print must go
to RESULT.log. The result has, for each workload, its outputs, its requests, what happened, what
the tracers checked, and why the workload does not count if it does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _run import UP, end_with_the_script

IDLE_SECONDS = 0.5  # between two workloads: at idle, everything is counted and compared
LIMIT = 240.0  # seconds that one workload may take


def main() -> None:
    end_with_the_script()
    name, result = sys.argv[1], Path(sys.argv[2])
    published = result.with_suffix(".counts")
    published.unlink(missing_ok=True)
    from _healthy import counts
    from _healthy.groups import group_of
    from _healthy.workload import Client, NotExercised

    from g4debug import cpu

    armed = "G4DEBUG_TRACE" in os.environ
    if armed:
        os.environ[counts.VARIABLE] = str(published)
    cpu.prepare()
    from sglang.srt.entrypoints.engine import Engine as SGLangEngine

    from g4debug.cpu.server import engine_arguments

    class Engine(SGLangEngine):  # type: ignore[misc]  # SGLang has no types
        run_scheduler_process_func = staticmethod(counts.run_scheduler_process)

    group = group_of(name)
    more = group.prepare(result.parent) if group.prepare is not None else {}
    arguments = {"log_level": "info", "decode_log_interval": 1, **group.engine, **more}
    engine = Engine(**engine_arguments(mtp=group.mtp, **arguments))
    print(UP, flush=True)
    found: dict[str, Any] = {}
    try:
        for workload in group.workloads:
            print(f"g4debug-repro: {workload.id}", flush=True)
            before = counts.counts(counts.latest(published)) if armed else {}
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
            records = counts.latest(published) if armed else []
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
    finally:
        engine.shutdown()
    print("g4debug-repro: completed", flush=True)


if __name__ == "__main__":  # spawned children import this module, too
    main()
