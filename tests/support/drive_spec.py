"""Driven by test_spec_lifecycle_engine.py, in a process of its own.

``drive_spec.py mixed``: prompts of mixed length with shared prefixes, chunked, more requests
than fit (retractions), and aborts. ``drive_spec.py mixed-no-radix``: the same without a prefix
cache. ``drive_spec.py faults``: the first half of the requests. ``drive_spec.py waiting``: one
request fits, the rest wait. A second argument: more arguments of the engine, as JSON.
"""

import asyncio
import json
import os
import random
import sys

import told_status

WAITING = 4


def workload(kind):
    """(prompt tokens, output tokens) of each request, and the engine's arguments."""
    rng = random.Random(5)
    if kind == "waiting":
        pool = {"max_total_tokens": 512, "chunked_prefill_size": 512, "disable_radix_cache": True}
        return [(300, 8)] * WAITING, pool
    sizes = [
        (rng.choice([5, 30, 64, 65, 130, 300]), rng.choice([1, 2, 3, 8, 20])) for _ in range(40)
    ]
    sizes += [(rng.choice([64, 130]), 150) for _ in range(8)]  # these outgrow the pool
    if kind == "faults":
        sizes = sizes[:20]
    pool = {
        "max_total_tokens": 1600,
        "chunked_prefill_size": 128,
        "schedule_conservativeness": 0.05,
        "disable_radix_cache": kind == "mixed-no-radix",
    }
    return sizes, pool


def prompts_of(sizes):
    rng = random.Random(7)
    prefix = [2, *(rng.randrange(4, 512) for _ in range(200))]
    for i, (tokens, _) in enumerate(sizes):
        own = [rng.randrange(4, 512) for _ in range(tokens - 1)]
        yield prefix + own[:40] if i % 3 == 0 else [2, *own]


async def run(engine, sizes, aborted):
    async def one(i, prompt, tokens):
        # Not ignore_eos: when 0.5.23 admits a request, it keeps room for all that the running ones
        # with ignore_eos may still answer, and retracts nobody. The toy model ends none of these.
        sampling = {"temperature": 0, "max_new_tokens": tokens}
        out = await engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=f"r{i}")
        return out["output_ids"], out["meta_info"]["finish_reason"]["type"]

    async def abort():
        for rid in aborted:
            await asyncio.sleep(0.3)
            engine.tokenizer_manager.abort_request(rid)

    prompts = list(prompts_of(sizes))
    work = [one(i, p, n) for i, (p, (_, n)) in enumerate(zip(prompts, sizes, strict=True))]
    done = await asyncio.gather(*work, abort())
    return done[:-1]


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    sizes, pool = workload(sys.argv[1])
    pool |= json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    engine = sglang.Engine(**engine_arguments(log_level="info", **pool))
    aborted = [f"r{i}" for i in range(5, len(sizes), 17)] if sys.argv[1] != "waiting" else []
    done = engine.loop.run_until_complete(run(engine, sizes, aborted))
    tokens = {f"r{i}": ids for i, (ids, why) in enumerate(done) if why == "length"}
    print("RESULT", json.dumps(tokens), flush=True)
    if "G4DEBUG_TRACE" in os.environ:
        told_status.tell()
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
