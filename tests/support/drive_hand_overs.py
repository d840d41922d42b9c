"""Driven by test_hand_overs_engine.py, in a process of its own: the engine that is meddled with.

``drive_hand_overs.py ARGUMENTS_JSON``: more arguments of the engine.
"""

import json
import random
import sys

from hand_over_meddler import ROWS

LENGTHS = (200, 131, 77)
OUTPUT = 48


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)
    prompts = [[2, *(rng.randrange(4, 512) for _ in range(n - 1))] for n in LENGTHS[:ROWS]]
    engine = sglang.Engine(**engine_arguments(**json.loads(sys.argv[1])))
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    rids = [f"len{n}" for n in LENGTHS]
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, rid=rids)
    print("RESULT", json.dumps([o["output_ids"] for o in outputs]), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
