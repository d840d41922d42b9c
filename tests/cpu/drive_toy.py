"""Driven by test_toys_engine.py: two waves of one engine that serves a toy.

``drive_toy.py MODEL ARGUMENTS_JSON``: prompts in chunks, shared prefixes, more than the pool holds
at once, and answers from the prefix cache.
"""

import json
import os
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
import told_status

OUTPUT = 40  # of the longest answer


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(3)

    def tokens(count):
        return [rng.randrange(4, 512) for _ in range(count)]

    shared = [2, *tokens(200)]
    prompts = [[2, *tokens(n)] for n in (0, 29, 62, 63, 64, 300, 500)]
    prompts += [[*shared, *tokens(n)] for n in (1, 60, 250)]
    arguments = {
        "model": sys.argv[1],
        "chunked_prefill_size": 128,
        "max_total_tokens": 2048,
        **json.loads(sys.argv[2]),
    }
    engine = sglang.Engine(**engine_arguments(**arguments))
    try:
        for _ in range(2):  # the second time from the prefix cache
            sampling = [
                {"temperature": 0, "max_new_tokens": OUTPUT - n, "ignore_eos": True}
                for n in range(len(prompts))
            ]
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
            found = [
                {"prompt": p, "tokens": o["output_ids"]}
                for p, o in zip(prompts, outputs, strict=True)
            ]
            print("RESULT", json.dumps(found), flush=True)
        if "G4DEBUG_TRACE" in os.environ:
            told_status.tell()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
