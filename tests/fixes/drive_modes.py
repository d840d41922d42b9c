"""Driven by test_modes.py: a healthy server's answers, in a process of its own.

Prompts share beginnings, some are sent twice, answers end one after the other, and the prefix
cache has to evict. The first request of a round ends last, when nobody waits: SGLang 0.5.12 would
not survive without a fix that a batch ends in one verify while a request waits.
"""

import json
import random
import sys


def main(mtp):
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(3)

    def some(count):
        return [rng.randrange(4, 512) for _ in range(count)]

    shared = [[2, *some(n)] for n in (63, 130)]
    rounds = [[[*shared[i % 2], *some(20 + 30 * i)] for i in range(6)] for _ in range(3)]
    rounds.append(rounds[0])
    arguments = engine_arguments(mtp=mtp == "mtp", max_total_tokens=4096, skip_tokenizer_init=True)
    engine = sglang.Engine(**arguments)
    answers = []
    for prompts in rounds:
        sampling = [
            {"temperature": 0, "max_new_tokens": 12 + 12 * (6 - i), "ignore_eos": True}
            for i in range(len(prompts))
        ]
        for o in engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True):
            meta = o["meta_info"]
            answers.append(
                {
                    "tokens": o["output_ids"],
                    "logprobs": [x[0].hex() for x in meta["output_token_logprobs"]],
                    "cached": meta["cached_tokens"],
                }
            )
    print("RESULT", json.dumps(answers), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
