"""Driven by test_hook_calls.py: one request after the other, with one prefix, on the CPU engine."""

import random
import sys
import time

REQUESTS, OUTPUT = 5, 16


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)

    def tokens(count):
        return [rng.randrange(4, 512) for _ in range(count)]

    prefix = [2, *tokens(127)]
    engine = sglang.Engine(**engine_arguments())
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    for _ in range(REQUESTS):
        time.sleep(1)  # or what is left of the request before may be in the round of this one
        engine.generate(input_ids=[[*prefix, *tokens(60)]], sampling_params=sampling)
    print("RESULT 1", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
