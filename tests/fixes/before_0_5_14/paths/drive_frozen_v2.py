"""Driven by test_frozen_v2_engine.py, in a process of its own: what a verify may do to a request.

It ends in the middle of one, by a stop token, a string, a regex or its length; it has penalties or
asks for logprobs; its prompt is chunked or cached; it reaches the end of the context. Each round
prints what came out. Arguments: overrides of the engine's as JSON, ``short`` for few rounds.
"""

import json
import os
import random
import sys

CONTEXT = 512
GREEDY = {"temperature": 0, "ignore_eos": True}


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    overrides = next((json.loads(a) for a in sys.argv[1:] if a.startswith("{")), {})
    spared = overrides.get("speculative_num_draft_tokens", 4)
    rng = random.Random(5)

    def tokens(n):
        return [2, *(rng.randrange(4, 512) for _ in range(n - 1))][:n]

    engine = sglang.Engine(
        **engine_arguments(
            **{
                "context_length": CONTEXT,
                "chunked_prefill_size": 128,
                "max_total_tokens": 4096,
                "log_level": "info",
                **overrides,
            }
        )
    )

    def serve(name, prompts, params, **more):
        outputs = engine.generate(input_ids=prompts, sampling_params=params, **more)
        lines = []
        for output in outputs:
            meta = output["meta_info"]
            lines.append(
                {
                    "tokens": output["output_ids"],
                    "text": output["text"],
                    "finish": meta["finish_reason"],
                    "cached": meta["cached_tokens"],
                    "verifies": meta.get("spec_verify_ct"),
                    "input": [x[0] for x in meta.get("input_token_logprobs") or []],
                    "output": [x[:2] for x in meta.get("output_token_logprobs") or []],
                    "top": [[y[1] for y in x or []] for x in meta.get("output_top_logprobs") or []],
                    "asked": [
                        [y[:2] for y in x or []]
                        for x in meta.get("output_token_ids_logprobs") or []
                    ],
                }
            )
        # In one write: a long line in several may have another process's in between.
        line = json.dumps({"round": name, "requests": lines})
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), f"RESULT {line}\n".encode())
        return lines

    prompts = [tokens(rng.randint(3, 90)) for _ in range(12)]
    lengths = [1, 2, 3, 5, *(rng.randint(8, 40) for _ in range(8))]
    plain = serve("plain", prompts, [{**GREEDY, "max_new_tokens": n} for n in lengths])
    if "grammar" in sys.argv:
        for asks in ({"regex": "[0-9]+"}, {"json_schema": "{}"}):
            try:
                engine.generate(input_ids=prompts[0], sampling_params={**GREEDY, **asks})
            except ValueError as e:
                print("RESULT", json.dumps({"round": "refused", "requests": str(e)}))
    if "short" in sys.argv:
        engine.shutdown()
        return
    # Its own token ends a request, at each place of a verify; and its length right after that.
    ends = [(i, p["tokens"], k) for i, p in enumerate(plain) for k in range(4, 9)]
    ends = [(i, out, k) for i, out, k in ends if len(out) > k + 3][:24]
    for name, left in (("stop tokens", 99), ("a stop token, then the length", 2)):
        serve(
            name,
            [prompts[i] for i, _, _ in ends],
            [
                {
                    "temperature": 0,
                    "stop_token_ids": [out[k]],
                    "max_new_tokens": min(k + 1 + left, 60),
                }
                for _, out, k in ends
            ],
        )
    texts = [(i, p["text"]) for i, p in enumerate(plain) if len(p["text"]) > 12]
    stops = [(i, text[at : at + 3]) for i, text in texts for at in (4, 7)]
    serve(
        "stop strings",
        [prompts[i] for i, _ in stops],
        [{**GREEDY, "max_new_tokens": 40, "stop": [text]} for _, text in stops],
    )
    serve(
        "a stop regex",
        [prompts[i] for i, _ in texts],
        [{**GREEDY, "max_new_tokens": 40, "stop_regex": "[0-9a-m]{2,}"} for _ in texts],
    )
    penalties = (
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.8},
        {"presence_penalty": 0.9},
        {"min_new_tokens": 12},
        {"logit_bias": {"7": 3.0, "19": -5.0}},
        {},
    )
    serve(
        "penalties",
        prompts,
        [
            {**GREEDY, "max_new_tokens": 24, **penalties[i % len(penalties)]}
            for i in range(len(prompts))
        ],
    )
    shared = tokens(200)
    serve("a prefix for later", [shared + tokens(9)], {**GREEDY, "max_new_tokens": 9})
    serve(
        "prefix hits, chunks",
        [shared + tokens(n) for n in (5, 140, 2, 64)] + [tokens(300), tokens(129)],
        {**GREEDY, "max_new_tokens": 15},
    )
    serve(
        "logprobs",
        [*prompts[:4], shared + tokens(30)],
        {**GREEDY, "max_new_tokens": 11},
        return_logprob=[True, True, False, True, True],
        logprob_start_len=[0, -1, -1, 2, 0],
        top_logprobs_num=[0, 3, 0, 2, 0],
        token_ids_logprob=[[3], [5, 6], [3], [9], [7]],
    )
    serve(
        "to the end of the context",
        [tokens(CONTEXT - n) for n in (60, 33, 12, 7)],
        # SGLang keeps the tokens of one verify free.
        [{**GREEDY, "max_new_tokens": n - spared} for n in (60, 33, 12, 7)],
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
