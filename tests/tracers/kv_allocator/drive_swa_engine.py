"""Driven by test_kv_allocator_engine.py, in a process of its own.

``drive_swa_engine.py [WAVES [ENGINE_JSON]]``: prefix hits, chunked prefill, aborts, an emptied
cache; pools that a full batch does not fit into, so that requests wait, are retracted, and the
cache is evicted.
"""

import json
import random
import sys
import threading
import time


def prompts(seed):
    rng = random.Random(seed)

    def tokens(n):
        return [rng.randrange(4, 512) for _ in range(n)]

    prefix = [2, *tokens(260)]
    found = []
    for number in range(14):
        shared = number % 2
        prompt = prefix[: rng.randrange(70, 260)] if shared else [2]
        found.append((prompt + tokens(rng.randrange(5, 90 if shared else 330)), 4 + number * 9))
    return found


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    waves = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    overrides = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    settings = {
        "max_total_tokens": 1024,
        "max_running_requests": 6,
        "chunked_prefill_size": 256,
        "schedule_conservativeness": 0.01,  # admits more than fits: requests are retracted
    }
    engine = sglang.Engine(**engine_arguments(**settings, **overrides))
    outputs = {}

    def wave(seed, prefix=""):
        work = prompts(seed)
        found = engine.generate(
            input_ids=[p for p, _ in work],
            rid=[f"{prefix}r{seed}-{i}" for i in range(len(work))],
            # Not ignore_eos: when 0.5.23 admits a request, it keeps room for all that the running
            # ones with ignore_eos may still answer, and retracts nobody. The toy model ends none.
            sampling_params=[{"temperature": 0, "max_new_tokens": n} for _, n in work],
        )
        return [o["output_ids"] for o in found]

    try:
        outputs["first"] = wave(1)
        time.sleep(0.4)  # idle: SGLang counts its pages
        if waves > 1:
            more(engine, wave, outputs)
        print("RESULT", json.dumps(outputs), flush=True)
    finally:
        engine.shutdown()


def more(engine, wave, outputs):
    outputs["again"] = wave(1, "again-")  # prefix hits
    loop = engine.loop
    # The last answer is sent before the server counts itself as idle, so it may have to wait.
    flushed = loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60))
    assert flushed.success, flushed.message
    abort = engine.tokenizer_manager.abort_request
    for seconds, rid in ((0.3, "a-r2-12"), (0.6, "a-r2-13")):
        call = lambda rid=rid: loop.call_soon_threadsafe(abort, rid)  # noqa: E731
        threading.Timer(seconds, call).start()
    wave(2, "a-")  # what is aborted, and when, is not the same in each run
    outputs["last"] = wave(3)
    time.sleep(0.4)


if __name__ == "__main__":
    main()
