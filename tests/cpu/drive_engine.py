"""Driven by test_engine.py in a process of its own; prints one JSON line per stage."""

import json
import os
import random
import sys
from pathlib import Path


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    mtp = sys.argv[1] == "mtp"
    rng = random.Random(5)
    # All end in their third page, the last step included, which overlap scheduling runs in vain. So
    # the tables of a batch may change places: what is behind a neighbour's pages may be no page.
    prompts = [[2, *(rng.randrange(4, 512) for _ in range(130))] for _ in range(4)]
    engine = sglang.Engine(**engine_arguments(mtp=mtp, disable_radix_cache=True))

    def generate(stage):
        sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        tokens = [o["output_ids"] for o in outputs]
        steps = sum(o["meta_info"].get("spec_verify_ct", 0) for o in outputs)
        made = sum(len(t) for t in tokens)
        line = {"stage": stage, "tokens": tokens, "accept_length": made / steps if steps else None}
        print("RESULT", json.dumps(line), flush=True)

    generate("first")
    if mtp:
        flags = Path(os.environ["MEDDLER_FLAGS"])
        generate("again")
        (flags / "wrong-draft").touch()
        generate("wrong-draft")
        (flags / "wrong-draft").unlink()
        (flags / "out-of-range").touch()
        generate("out-of-range")  # never comes back
    engine.shutdown()


if __name__ == "__main__":
    main()
