"""Driven by test_black_box_engine.py: an engine that serves until its scheduler is gone.

``drive_killed.py mtp|plain RANKS OVERLAP``; with OVERLAP 0 without overlap scheduling. RANKS are
tensor-parallel, and with ``dp`` in front data-parallel.
"""

import random
import sys
import time


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)
    if sys.argv[2].startswith("dp"):  # each rank takes a port of its own
        arguments = {"dp_size": int(sys.argv[2][2:]), "nccl_port": None}
    else:
        arguments = {"tp_size": int(sys.argv[2])}
    if sys.argv[3] == "0":
        arguments["disable_overlap_schedule"] = True
    engine = sglang.Engine(**engine_arguments(mtp=sys.argv[1] == "mtp", **arguments))
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    for _ in range(2):
        prompts = [[2, *(rng.randrange(4, 512) for _ in range(n))] for n in (70, 130, 20)]
        engine.generate(input_ids=prompts, sampling_params=sampling)
    print("SERVED", flush=True)
    if len(sys.argv) > 4:  # it is to be killed while it has nothing to do
        time.sleep(60)
    engine.shutdown()


if __name__ == "__main__":
    main()
