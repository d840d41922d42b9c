"""Driven by engine tests, in a process of its own: two batches on the CPU engine.

``drive_tracers.py [ARGUMENTS_JSON]``: more arguments of the engine.
"""

import json
import random
import sys

LENGTHS = (370, 130, 250)  # further apart than what is generated: a length names its request
OUTPUT = 24


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)

    def prompts():
        return [[2, *(rng.randrange(4, 512) for _ in range(n - 1))] for n in LENGTHS]

    more = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    engine = sglang.Engine(**engine_arguments(disable_radix_cache=True, **more))
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    outputs = []
    for _ in range(2):  # the second one's rows of the tables had other owners before
        outputs += engine.generate(
            input_ids=prompts(), sampling_params=sampling, rid=[f"len{n}" for n in LENGTHS]
        )
    print("RESULT", json.dumps([len(o["output_ids"]) for o in outputs]), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
