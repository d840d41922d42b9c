"""Driven by test_pool_leak_engine.py: the turns of a session beside other requests."""

import json
import random
import sys

TURNS = 3


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(13)

    def tokens(count):
        return [rng.randrange(4, 512) for _ in range(count)]

    greedy = {"temperature": 0, "ignore_eos": True}
    engine = sglang.Engine(**engine_arguments())
    try:
        session = engine.open_session(capacity_of_str_len=4000)
        engine.generate(input_ids=[2, *tokens(90)], sampling_params={**greedy, "max_new_tokens": 4})
        lengths, last = [], None
        for turn in range(TURNS):
            output = engine.generate(
                input_ids=[2, *tokens(150)] if last is None else tokens(70),
                sampling_params={**greedy, "max_new_tokens": 24},
                session_params={"id": session, "rid": last, "drop_previous_output": False},
            )
            last = output["meta_info"]["id"]
            lengths.append(output["meta_info"]["prompt_tokens"])
            assert turn or lengths[0] == 151
        print("RESULT", json.dumps(lengths), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
