"""Driven by test_page_one_engine.py: two waves where a page is one token.

trtllm_mha has no pages of one token, so attention is torch_native's. It reads a sliding layer at
full-pool indices, so what it answers depends on freed memory, and is not looked at.
"""

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
    engine = sglang.Engine(
        **engine_arguments(
            mtp=False,
            attention_backend="torch_native",
            page_size=1,
            swa_full_tokens_ratio=1.0,
            disable_radix_cache=True,
            disable_overlap_schedule=True,
        )
    )
    counts = []
    for wave in range(2):
        outputs = engine.generate(
            input_ids=[[2, *(rng.randrange(4, 512) for _ in range(n - 1))] for n in LENGTHS],
            sampling_params=[
                {"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in OUTPUTS
            ],
            rid=[f"wave{wave}-{n}" for n in LENGTHS],
        )
        counts.append([len(o["output_ids"]) for o in outputs])
        time.sleep(1)  # idle: everything is compared and counted
    print("RESULT", json.dumps(counts), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
