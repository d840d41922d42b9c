"""Driven by test_backends_engine.py: prompts in chunks, shared prefixes, and answers of one engine.

``drive_backends.py mtp|plain ARGUMENTS_JSON``
"""

import json
import random
import sys


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(1)

    def tokens(count):
        return [rng.randrange(4, 512) for _ in range(count)]

    shared = [2, *tokens(150)]
    prompts = [[2, *tokens(29)], [2, *tokens(300)], [*shared, *tokens(60)], [*shared, *tokens(200)]]
    arguments = {"chunked_prefill_size": 128, **json.loads(sys.argv[2])}
    engine = sglang.Engine(**engine_arguments(mtp=sys.argv[1] == "mtp", **arguments))
    try:
        for _ in range(2):  # the second time from the prefix cache
            sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
            accepted = [o["meta_info"].get("spec_accept_length") for o in outputs]
            found = {"tokens": [o["output_ids"] for o in outputs], "accepted": accepted}
            print("RESULT", json.dumps(found), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
