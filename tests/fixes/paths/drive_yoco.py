"""Driven by test_yoco_engine.py, in a process of its own: mixed prefills on the CPU engine.

Chunked prefill, prefix hits, one-token prompts, prompt logprobs beside none. Arguments: mtp,
overlap, mixed (chunks of prompts in a batch with decodes), tp (two ranks), triton (the only
backend), and split for prefill on triton, which Triton interprets, so with shorter answers.
"""

import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
import told_status

OUTPUT = 12
SPLIT = {
    "attention_backend": None,
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "trtllm_mha",
    "speculative_attention_mode": "decode",  # verify not on triton
}


WAYS = {
    "split": SPLIT,
    "triton": {"attention_backend": "triton"},
    "mixed": {"enable_mixed_chunk": True},
    "tp": {"tp_size": 2},
}


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(3)

    def tokens(n):
        return [2, *(rng.randrange(4, 512) for _ in range(n - 1))][:n]

    shared = tokens(192)
    rounds = {
        "long, short, one": ([tokens(300), tokens(40), tokens(1), tokens(97)], None),
        "a prefix for later": ([shared + tokens(9)], None),
        "prefix hits": ([shared + tokens(n) for n in (5, 70, 2)], None),
        "prompt logprobs": ([tokens(90), shared + tokens(30), tokens(64)], [40, -1, 0]),
    }
    engine = sglang.Engine(
        **engine_arguments(
            mtp="mtp" in sys.argv,
            chunked_prefill_size=128,
            disable_overlap_schedule="overlap" not in sys.argv,
            log_level="info",
            **{name: value for way in sys.argv[1:] for name, value in WAYS.get(way, {}).items()},
        )
    )
    output = OUTPUT // 3 if "split" in sys.argv else OUTPUT
    sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
    for name, (prompts, starts) in rounds.items():
        more = {} if starts is None else {"return_logprob": True, "logprob_start_len": starts}
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling, **more)
        line = {
            "round": name,
            "tokens": [o["output_ids"] for o in outputs],
            "cached": [o["meta_info"]["cached_tokens"] for o in outputs],
            "verifies": [o["meta_info"].get("spec_verify_ct") for o in outputs],
            "logprobs": [
                [value for value, *_ in o["meta_info"].get("input_token_logprobs") or []]
                for o in outputs
            ],
        }
        print("RESULT", json.dumps(line), flush=True)
    if "G4DEBUG_TRACE" in os.environ:
        told_status.tell()
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
