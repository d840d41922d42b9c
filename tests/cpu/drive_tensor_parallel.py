"""Driven by test_tensor_parallel_engine.py: one batch, on one rank or on several.

``drive_tensor_parallel.py mtp|plain RANKS``. Prints its result, and which schedulers there were.
"""

import json
import random
import sys

import psutil

OUTPUT = 32


def schedulers():
    """The titles that SGLang gives its schedulers, one for each rank."""
    titles = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    return sorted(t.split()[0] for t in titles if t.startswith("sglang::scheduler"))


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)
    prompts = [[2, *(rng.randrange(4, 512) for _ in range(n))] for n in (130, 40, 300, 90)]
    arguments = engine_arguments(mtp=sys.argv[1] == "mtp", tp_size=int(sys.argv[2]))
    engine = sglang.Engine(**arguments)
    try:
        ranks = schedulers()
        sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        # The second time from the prefix cache.
        outputs += engine.generate(input_ids=prompts, sampling_params=sampling)
        steps = sum(o["meta_info"].get("spec_verify_ct", 0) for o in outputs)
        found = {
            "ranks": ranks,
            "tokens": [o["output_ids"] for o in outputs],
            "accept_length": OUTPUT * len(outputs) / steps if steps else None,
        }
        print("RESULT", json.dumps(found), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
