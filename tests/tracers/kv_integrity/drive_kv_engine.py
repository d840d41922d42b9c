"""Driven by test_kv_integrity_engine.py, in a process of its own: two waves on the CPU engine."""

import json
import random
import sys
import time

LENGTHS = (370, 130, 250, 200)
OUTPUTS = (24, 6, 40, 12)  # the first to end frees pages while the others run


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)
    engine = sglang.Engine(**engine_arguments(disable_radix_cache=True))
    tokens = []
    for wave in range(2):
        outputs = engine.generate(
            input_ids=[[2, *(rng.randrange(4, 512) for _ in range(n - 1))] for n in LENGTHS],
            sampling_params=[
                {"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in OUTPUTS
            ],
            rid=[f"wave{wave}-{n}" for n in LENGTHS],
        )
        tokens.append([o["output_ids"] for o in outputs])
        time.sleep(1)  # idle: everything is compared
    print("RESULT", json.dumps(tokens), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
