"""Driven by engine tests, in a process of its own: long prompts on a server with a SWA pool.

``drive_parked_chunk.py SERVER_JSON``: mtp, engine (its arguments), and prompts. ``branches`` are
such as let a prompt stand that has a prefix cache: they have a beginning in common, which loses its
SWA pages meanwhile. With ``beside`` one is long, and comes with short ones. logprobs: ask for them,
too. It prints each request's tokens, or None if one that was sent with it got none; their logprobs;
and, if the plugin ``parked_counter`` is there, in how many rounds a prompt was parked, and how
often the fix parked-chunk gave something back.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path

PATIENCE = 150.0  # seconds without an answer to anybody


def bursts(kind):
    """Lists of prompts that are sent together, each list when the one before is served."""
    rng = random.Random(42)

    def tokens(count):
        return [rng.randrange(4, 512) for _ in range(count)]

    shared = [2, *tokens(319)]
    if kind == "beside":
        return [[[2, *tokens(n)] for n in (99, 109, 119, 129, 1699)]]
    if kind == "branches":
        more = [[*shared, *tokens(n)] for n in (700, 600, 500)]
        return [[shared], [[2, *tokens(899)]], more[:1], [[2, *tokens(799)]], more[1:]]
    longs = [[2, *tokens(n)] for n in (1100, 700, 1300, 200, 90, 900)]
    return [longs[:3], longs[3:], [[*shared, *tokens(n)] for n in (500, 900)]]


async def drive(engine, kind, logprobs):
    answers, found, sampling = {}, {}, {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    for number, prompts in enumerate(bursts(kind)):
        names = [f"{number}-{n}" for n in range(len(prompts))]
        answers |= dict.fromkeys(names)
        # As one batch: it reaches the scheduler in one round, on each server in the same state.
        burst = engine.async_generate(
            input_ids=prompts, sampling_params=sampling, rid=names, return_logprob=logprobs
        )
        try:
            served = await asyncio.wait_for(burst, PATIENCE)
        except TimeoutError:
            break
        for name, one in zip(names, served, strict=True):
            answers[name] = one["output_ids"]
            if logprobs:  # as hexadecimal floats
                found[name] = [x[0].hex() for x in one["meta_info"]["output_token_logprobs"]]
    return answers, found


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    server = json.loads(sys.argv[1])
    engine = sglang.Engine(
        **engine_arguments(server["mtp"], skip_tokenizer_init=True, **server["engine"])
    )
    ask = drive(engine, server["prompts"], server.get("logprobs", False))
    answers, logprobs = engine.loop.run_until_complete(ask)
    counts = Path(os.environ.get("PARKED_COUNTS", os.devnull))
    count = counts.read_text() if counts.is_file() else ""
    result = {
        "answers": answers, "logprobs": logprobs, "parked": count.count("p"),
        "acted": count.count("x"),
    }  # fmt: skip
    print("RESULT", json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
