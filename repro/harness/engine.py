"""One variant of a repro, in a process of its own: start an Engine, generate, write the result.

:mod:`_run` calls it: ``python repro/_variant.py WORKLOAD DEVICE REQUESTS RESULT.json``. WORKLOAD is
``MODULE`` or ``MODULE:NAME``. NAME (``DEVICES`` if it is not given) is a dict in that module: from
the device to a function that takes the number of requests and returns the workload.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

from _arguments import as_named_here
from _run import end_with_the_script


def main() -> None:
    end_with_the_script()
    module, device, requests, result = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    module, _, name = module.partition(":")
    devices = getattr(importlib.import_module(module), name or "DEVICES")
    workload = devices[device](requests or None)

    import sglang

    begin = time.perf_counter()
    engine = sglang.Engine(**as_named_here(workload.engine))
    up = time.perf_counter()
    print("g4debug-repro: engine up", flush=True)
    try:
        prompts, lengths = workload.prompts(), workload.output
        lengths = [lengths] * len(prompts) if isinstance(lengths, int) else lengths
        outputs = engine.generate(
            input_ids=prompts,
            sampling_params=[
                {"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in lengths
            ],
        )
    finally:
        done = time.perf_counter()
        engine.shutdown()
    accepted = [o["meta_info"].get("spec_accept_length", 1.0) for o in outputs]
    Path(result).write_text(
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
