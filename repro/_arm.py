"""One arm of a repro, in a process of its own: start an Engine, generate, write what came out.

Run by :mod:`_run`: ``python repro/_arm.py DEVICE REQUESTS RESULT.json``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from _workload import DEVICES


def main() -> None:
    device, requests, result = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    workload = DEVICES[device](requests or None)

    import sglang

    begin = time.perf_counter()
    engine = sglang.Engine(**workload.engine)
    up = time.perf_counter()
    print("g4debug-repro: engine up", flush=True)
    try:
        outputs = engine.generate(
            input_ids=workload.prompts(),
            sampling_params={
                "temperature": 0,
                "max_new_tokens": workload.output,
                "ignore_eos": True,
            },
        )
    finally:
        done = time.perf_counter()
        engine.shutdown()
    accepted = [o["meta_info"].get("spec_accept_length", 1.0) for o in outputs]
    result.write_text(
        json.dumps(
            {
                "tokens": [o["output_ids"] for o in outputs],
                "accept_length": sum(accepted) / len(accepted),
                "start_s": up - begin,
                "generate_s": done - up,
            }
        )
    )


if __name__ == "__main__":  # spawned children import this module, too
    main()
