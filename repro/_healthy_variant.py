"""One group of healthy workloads on one engine, in a process of its own.

``python repro/_healthy_variant.py GROUP RESULT.json``. What the engine's processes print must go
to RESULT.log. The result has, for each workload, its outputs, its requests, what happened, and
why it does not count if it does not.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from _run import end_with_the_script

IDLE_SECONDS = 0.4  # between two workloads: at idle, everything is counted and compared


def main() -> None:
    end_with_the_script()
    name, result = sys.argv[1], Path(sys.argv[2])
    log = result.with_suffix(".log")
    from g4debug import cpu

    cpu.prepare()
    import sglang
    from _healthy.groups import group_of
    from _healthy.workload import Client, NotExercised

    from g4debug.cpu.server import engine_arguments

    group = group_of(name)
    more = group.prepare(result.parent) if group.prepare is not None else {}
    arguments = {"log_level": "info", "decode_log_interval": 1, **group.engine, **more}
    engine = sglang.Engine(**engine_arguments(mtp=group.mtp, **arguments))
    print("g4debug-repro: engine up", flush=True)
    found: dict[str, Any] = {}
    try:
        for workload in group.workloads:
            print(f"g4debug-repro: {workload.id}", flush=True)
            client, problem, begin = Client(engine, workload.id, log), "", time.perf_counter()
            try:
                engine.loop.run_until_complete(
                    asyncio.wait_for(workload.drive(client), timeout=240)
                )
            except NotExercised as e:
                problem = str(e)
            seconds = time.perf_counter() - begin
            time.sleep(IDLE_SECONDS)
            found[workload.id] = {
                "outputs": client.outputs,
                "requests": client.requests,
                "facts": client.facts,
                "problem": problem,
                "s": round(seconds, 1),
            }
            # After each: what died later does not hide what was done before.
            result.write_text(json.dumps(found))
    finally:
        engine.shutdown()
    print("g4debug-repro: completed", flush=True)


if __name__ == "__main__":  # spawned children import this module, too
    main()
