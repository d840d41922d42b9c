"""Driven by engine tests, in a process of its own: two batches on the CPU engine.

``drive_tracers.py [ARGUMENTS_JSON]``: more arguments of the engine. With ``UNTIL_DUMPED=1`` it ends
when there is a dump: what is found in an idle server comes after the last output.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

LENGTHS = (370, 130, 250)  # further apart than what is generated: a length names its request
OUTPUT = 24


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)

    def prompts():
        return [[2, *(rng.randrange(4, 512) for _ in range(n - 1))] for n in LENGTHS]

    more = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    engine = sglang.Engine(**engine_arguments(disable_radix_cache=True, **more))
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    outputs = []
    for _ in range(2):  # the second one's rows of the tables had other owners before
        outputs += engine.generate(
            input_ids=prompts(), sampling_params=sampling, rid=[f"len{n}" for n in LENGTHS]
        )
    print("RESULT", json.dumps([len(o["output_ids"]) for o in outputs]), flush=True)
    if os.environ.get("UNTIL_DUMPED"):
        until_dumped(Path(os.environ["SGLANG_TRTLLM_MHA_DEBUG_DIR"]))
    engine.shutdown()


def until_dumped(folder, seconds=120):
    end = time.monotonic() + seconds
    while not list(folder.glob("*.pt")) and time.monotonic() < end:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
    sys.exit(0)
