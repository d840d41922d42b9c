"""One server that was drawn at random, in a process of its own.

``python repro/_fuzz_variant.py SEED RESULT.json``. What its processes print must go to RESULT.log.
The result has how many requests were sent, and the status of the tracers at the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from _run import end_with_the_script

IDLE_SECONDS = 1.0  # at the end: when nothing runs, everything is counted


def main() -> None:
    end_with_the_script()
    seed, result = int(sys.argv[1]), Path(sys.argv[2])
    import _fuzz
    from _healthy.engine import running
    from _healthy.workload import Client

    shape = _fuzz.draw(seed)
    with running(result, shape.mtp, lambda: {"decode_log_interval": 20, **shape.engine}) as started:
        engine, status = started
        client = Client(engine, f"fuzz-{seed}", result.with_suffix(".log"))
        engine.loop.run_until_complete(_fuzz.drive(client, shape, seed))
        time.sleep(IDLE_SECONDS)
        told = {"requests": client.requests, "facts": client.facts, "status": status()}
        result.write_text(json.dumps(told))


if __name__ == "__main__":  # spawned children import this module, too
    main()
