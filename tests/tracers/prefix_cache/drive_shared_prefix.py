"""Driven by test_prefix_cache_engine.py: prompts that share a beginning, twice."""

import json
import random
import sys


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(7)
    shared = [2, *(rng.randrange(4, 512) for _ in range(260))]
    prompts = [shared + [rng.randrange(4, 512) for _ in range(n)] for n in (140, 90, 200)]
    engine = sglang.Engine(**engine_arguments())
    sampling = {"temperature": 0, "max_new_tokens": 140, "ignore_eos": True}
    outputs = []
    for _ in range(2):
        for prompt in prompts:
            outputs.append(engine.generate(input_ids=prompt, sampling_params=sampling))
    cached = [o["meta_info"]["cached_tokens"] for o in outputs]
    print("RESULT", json.dumps(cached), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
