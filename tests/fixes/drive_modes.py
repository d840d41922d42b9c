"""Driven by test_modes.py: a healthy server's answers, in a process of its own.

``drive_modes.py MTP RADIX CHUNK PAGE OVERLAP``, as test_modes.py has them. Prompts share
beginnings, one is sent twice, some wait, and the prefix cache has to evict. The first request ends
last, when nobody waits: SGLang 0.5.12 would not survive without a fix that a batch ends in one
verify while a request waits.
"""

import json
import random
import sys


def main(mtp, radix, chunk, page, overlap):
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(3)

    def some(count):
        return [rng.randrange(4, 512) for _ in range(count)]

    shared = [[2, *some(n)] for n in (63, 130)]
    prompts = [[*shared[i % 2], *some(20 + 12 * i)] for i in range(11)]
    prompts.append(prompts[3])
    arguments = engine_arguments(
        mtp=mtp == "mtp", max_total_tokens=1536, max_running_requests=4, skip_tokenizer_init=True,
        disable_radix_cache=radix == "no-radix", page_size=int(page),
        disable_overlap_schedule=overlap == "no-overlap",
    )  # fmt: skip
    if int(page) == 1:  # trtllm_mha has no such pages
        arguments["attention_backend"] = "triton"
    if int(chunk):
        arguments["chunked_prefill_size"] = int(chunk)
    engine = sglang.Engine(**arguments)
    sampling = [
        {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        for n in (300, *(14 + 2 * i for i in range(1, len(prompts))))
    ]
    answers = [
        {
            "tokens": o["output_ids"],
            "logprobs": [x[0].hex() for x in o["meta_info"]["output_token_logprobs"]],
            "cached": o["meta_info"]["cached_tokens"],
        }
        for o in engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    ]
    print("RESULT", json.dumps(answers), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
