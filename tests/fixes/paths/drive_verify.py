"""Driven by test_verify_attention_engine.py: FROZEN_KV_MTP on triton, on the CPU engine."""

import json
import random

LENGTHS = (70, 33)
OUTPUT = 6


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)
    prompts = [[2, *(rng.randrange(4, 512) for _ in range(n - 1))] for n in LENGTHS]
    engine = sglang.Engine(**engine_arguments(True, attention_backend="triton", log_level="info"))
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    accepted = [o["meta_info"]["spec_verify_ct"] for o in outputs]
    print("RESULT", json.dumps([[o["output_ids"] for o in outputs], accepted]), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
