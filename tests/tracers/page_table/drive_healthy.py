"""Driven by test_page_table_engine.py: prefix hits, chunks, retraction, aborts, and no alarm.

``drive_healthy.py [FOLDER]``: with a folder for its models, one KV pool for all layers, and no
SWA allocator.
"""

import json
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path

RID = "h{}-{}"


def main():
    import sglang

    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.models import write
    from g4debug.cpu.server import engine_arguments, server_arguments

    rng = random.Random(11)
    prefix = [2, *(rng.randrange(4, 512) for _ in range(200))]
    settings = {
        "max_total_tokens": 1024,
        "swa_full_tokens_ratio": 0.9,
        "max_running_requests": 6,
        "chunked_prefill_size": 128,
        "schedule_conservativeness": 0.01,  # admits more than fits: requests are retracted
    }
    if len(sys.argv) > 1:
        # Layers of one pool have one head_dim.
        models = write(replace(TINY, head_dim=TINY.swa_head_dim), Path(sys.argv[1]))
        one_pool = {"disable_hybrid_swa_memory": True, "log_level": "warning"}
        engine = sglang.Engine(**server_arguments(models, **settings, **one_pool))
    else:
        engine = sglang.Engine(**engine_arguments(**settings))

    def wave(number, count, output):
        prompts = []
        for i in range(count):
            own = [rng.randrange(4, 512) for _ in range(rng.randrange(1, 120))]
            prompts.append([*prefix[: rng.choice((64, 130, 200))], *own] if i % 2 else [2, *own])
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        rids = [RID.format(number, i) for i in range(count)]
        found = engine.generate(input_ids=prompts, rid=rids, sampling_params=sampling)
        return [o["output_ids"] for o in found]

    try:
        tokens = [wave(1, 6, 40), wave(2, 8, 130)]
        abort = engine.tokenizer_manager.abort_request
        for seconds, i in ((0.5, 1), (1.0, 3)):
            arguments = (abort, RID.format(3, i))
            threading.Timer(seconds, engine.loop.call_soon_threadsafe, arguments).start()
        wave(3, 6, 60)  # when the abort comes is not the same in each run
        print("RESULT", json.dumps(tokens), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
