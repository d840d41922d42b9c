"""One server that was drawn at random, in a process of its own.

``python repro/_fuzz_variant.py SEED RESULT.json``. What its processes print must go to RESULT.log.
The result has how many requests were sent, and what the tracers checked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from _run import UP, end_with_the_script

IDLE_SECONDS = 1.0  # at the end: when nothing runs, everything is counted


def main() -> None:
    end_with_the_script()
    seed, result = int(sys.argv[1]), Path(sys.argv[2])
    published = result.with_suffix(".counts")
    published.unlink(missing_ok=True)
    from _healthy import counts

    from g4debug import cpu

    armed = "G4DEBUG_TRACE" in os.environ
    if armed:
        os.environ[counts.VARIABLE] = str(published)
    cpu.prepare()
    import _fuzz
    from _healthy.workload import Client
    from sglang.srt.entrypoints.engine import Engine as SGLangEngine

    from g4debug.cpu.server import engine_arguments

    class Engine(SGLangEngine):  # type: ignore[misc]  # SGLang has no types
        run_scheduler_process_func = staticmethod(counts.run_scheduler_process)

    shape = _fuzz.draw(seed)
    more = {"log_level": "info", "decode_log_interval": 20, **shape.engine}
    engine = Engine(**engine_arguments(mtp=shape.mtp, **more))
    print(UP, flush=True)
    client = Client(engine, f"fuzz-{seed}", result.with_suffix(".log"))
    try:
        engine.loop.run_until_complete(_fuzz.drive(client, shape, seed))
        time.sleep(IDLE_SECONDS)
        checked = counts.counts(counts.latest(published)) if armed else {}
        told = {"requests": client.requests, "facts": client.facts, "checked": checked}
        result.write_text(json.dumps(told))
    finally:
        engine.shutdown()


if __name__ == "__main__":  # spawned children import this module, too
    main()
