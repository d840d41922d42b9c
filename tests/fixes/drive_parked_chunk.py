"""Driven by engine tests, in a process of its own: long prompts on a server with a SWA pool.

``drive_parked_chunk.py SERVER_JSON``: mtp, engine (its arguments), and prompts. ``branches`` are
such as let a prompt stand that has a prefix cache: they have a beginning in common, which loses its
SWA pages meanwhile. With ``beside`` one is long, and comes with short ones. It prints each
request's tokens, or None for one that got none, and how often the fix parked-chunk gave something
back, if the plugin ``parked_counter`` is there.
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


async def drive(engine, kind):
    answers, sampling = {}, {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    for number, prompts in enumerate(bursts(kind)):
        names = [f"{number}-{n}" for n in range(len(prompts))]
        answers |= dict.fromkeys(names)
        sent = [
            asyncio.ensure_future(
                engine.async_generate(input_ids=ids, sampling_params=sampling, rid=name)
            )
            for name, ids in zip(names, prompts, strict=True)
        ]
        _, late = await asyncio.wait(sent, timeout=PATIENCE)
        for name, one in zip(names, sent, strict=True):
            answers[name] = None if one in late else one.result()["output_ids"]
            one.cancel()
        if late:
            break
    return answers


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    server = json.loads(sys.argv[1])
    engine = sglang.Engine(
        **engine_arguments(server["mtp"], skip_tokenizer_init=True, **server["engine"])
    )
    answers = engine.loop.run_until_complete(drive(engine, server["prompts"]))
    counts = Path(os.environ.get("PARKED_COUNTS", os.devnull))
    acted = len(counts.read_text()) if counts.is_file() else 0
    print("RESULT", json.dumps({"answers": answers, "acted": acted}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
