"""Driven by test_kv_writes_engine.py, in a process of its own: some requests on the CPU engine.

``drive_writes.py [BACKEND]``: the attention backend, trtllm_mha if it is not named.
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
    settings = {"disable_radix_cache": True}
    if len(sys.argv) > 1:
        settings["attention_backend"] = sys.argv[1]
    engine = sglang.Engine(**engine_arguments(**settings))
    prompts = [[2, *(rng.randrange(4, 512) for _ in range(n - 1))] for n in LENGTHS]
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    outputs = engine.generate(
        input_ids=prompts, sampling_params=sampling, rid=[f"len{n}" for n in LENGTHS]
    )
    print("RESULT", json.dumps([o["output_ids"] for o in outputs]), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
