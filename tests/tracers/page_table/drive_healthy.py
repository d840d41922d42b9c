"""Driven by test_page_table_engine.py: prefix hits, chunks, retraction, aborts, and no alarm.

``drive_healthy.py [--plain] [--page N] [--backends PREFILL,DECODE] [FOLDER]``: without MTP, with
pages of N tokens, on these attention backends; with a folder for its models, one KV pool for all
layers, and no SWA allocator.
"""

import argparse
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
    from g4debug.hooking import targets

    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--backends", default="")
    parser.add_argument("folder", nargs="?")
    args = parser.parse_args()
    rng = random.Random(11)
    settings = {
        "max_total_tokens": 768,
        "swa_full_tokens_ratio": 0.9,
        "max_running_requests": 6,
        "chunked_prefill_size": 128,
        "schedule_conservativeness": 0.01,  # admits more than fits: requests are retracted
    }
    settings["page_size"] = args.page
    if args.plain and targets.matches("<0.5.14"):  # there page-table checks ranges under overlap
        settings["disable_overlap_schedule"] = True
    if args.backends:
        prefill, decode = args.backends.split(",")
        settings |= {
            "attention_backend": prefill if prefill == decode else None,
            "prefill_attention_backend": prefill,
            "decode_attention_backend": decode,
        }
    if args.folder:
        # Layers of one pool have one head_dim.
        models = write(replace(TINY, head_dim=TINY.swa_head_dim), Path(args.folder))
        one_pool = {"disable_hybrid_swa_memory": True, "log_level": "warning"}
        engine = sglang.Engine(**server_arguments(models, not args.plain, **settings, **one_pool))
    else:
        engine = sglang.Engine(**engine_arguments(not args.plain, **settings))

    def tokens(count):
        return [rng.randrange(4, 512) for _ in range(count)]

    prefix = [2, *tokens(200)]

    def mixed(count):
        prompts = [[2, *tokens(rng.randrange(1, 120))] for _ in range(count)]
        for prompt in prompts[1::2]:
            prompt[:1] = prefix[: rng.choice((64, 130, 200))]
        return prompts

    def wave(number, prompts, output):
        # Not ignore_eos: when 0.5.23 admits a request, it keeps room for all that the running ones
        # with ignore_eos may still answer, and retracts nobody. The toy model ends none of these.
        sampling = {"temperature": 0, "max_new_tokens": output}
        rids = [RID.format(number, i) for i in range(len(prompts))]
        found = engine.generate(input_ids=prompts, rid=rids, sampling_params=sampling)
        return [o["output_ids"] for o in found]

    try:
        outputs = [wave(1, mixed(6), 30), wave(2, mixed(8), 40)]
        # Six prompts of a page fit; with their answers, five are more than the pool holds. Two are
        # a whole chunk, so SGLang refuses no third one in their step: with one pool it would then
        # admit nobody until a request ends.
        outputs.append(wave(3, [[2, *tokens(63)] for _ in range(6)], 90))
        abort = engine.tokenizer_manager.abort_request
        for seconds, i in ((0.3, 1), (0.6, 3)):
            arguments = (abort, RID.format(4, i))
            threading.Timer(seconds, engine.loop.call_soon_threadsafe, arguments).start()
        wave(4, mixed(6), 40)  # when the abort comes is not the same in each run
        print("RESULT", json.dumps(outputs), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
