"""Driven by test_rank_divergence_engine.py: two waves of mixed requests on two ranks.

``drive_ranks.py mtp|plain [ARGUMENTS_JSON]``: more arguments of the engine. Prints the number of
tokens of each answer, and what each rank has compared by then.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "repro"))

from harness import tracers

REQUESTS = 9  # of a wave: more than run at the same time


def compared():
    """Title of each scheduler -> its status of rank-divergence: state, and what was checked."""
    found = {}
    for title, status in tracers.shown().items():
        (mine,) = (t for t in status["tracers"] if t["name"] == "rank-divergence")
        count = sum(c["count"] for c in mine["checked"])
        found[title] = {"off": mine["off"], "steps": status["step"], "count": count}
    return found


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments
    from g4debug.hooking import targets

    # There a verify that samples is a CUDA kernel, for which the CPU engine has no stand-in.
    greedy = sys.argv[1] == "mtp" and targets.matches("==0.5.15.post1")
    rng = random.Random(5)
    more = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    arguments = engine_arguments(mtp=sys.argv[1] == "mtp", tp_size=2)
    engine = sglang.Engine(**{**arguments, **more})
    shared = [rng.randrange(4, 512) for _ in range(200)]

    def prompt(number):
        own = [rng.randrange(4, 512) for _ in range(rng.randrange(5, 300))]
        return [2, *(shared if number % 2 else []), *own]

    lengths = []
    for _ in range(2):
        sampling = [
            {
                "temperature": 0 if greedy or i % 3 else 1.0,
                "max_new_tokens": rng.randrange(1, 32),
                "ignore_eos": bool(i % 2),
            }
            for i in range(REQUESTS)
        ]
        prompts = [prompt(i) for i in range(REQUESTS)]
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        lengths += [len(o["output_ids"]) for o in outputs]
    print("RESULT", json.dumps({"lengths": lengths, "ranks": compared()}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
