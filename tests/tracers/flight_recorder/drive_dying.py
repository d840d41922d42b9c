"""Driven by test_innocence_engine.py: an engine that dies in its third batch at the latest."""

import random
import sys


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)
    engine = sglang.Engine(**engine_arguments(mtp=sys.argv[1] == "mtp"))
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    for _ in range(3):
        prompts = [[2, *(rng.randrange(4, 512) for _ in range(n))] for n in (370, 130, 250)]
        engine.generate(input_ids=prompts, sampling_params=sampling)
    print("IT LIVES", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
