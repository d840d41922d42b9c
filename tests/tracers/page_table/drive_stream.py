"""Driven by test_page_table_stream.py: one answer that is streamed on the CPU engine.

Each part is printed when it comes, so that the log has all that left a server that died. It is one
request, because which of several share a step depends on when they arrive.
"""

import json
import random
import sys

PROMPT = 370
OUTPUT = 60


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)
    prompt = [2, *(rng.randrange(4, 512) for _ in range(PROMPT - 1))]
    engine = sglang.Engine(**engine_arguments(disable_radix_cache=True, skip_tokenizer_init=True))
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}

    async def answer():
        parts = await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
        async for part in parts:
            print("PART", json.dumps(part["output_ids"]), flush=True)

    engine.loop.run_until_complete(answer())
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
