"""Driven by test_page_table_stream.py: three answers that are streamed on the CPU engine.

Each part is printed when it comes, so that the log has all that left a server that died.
"""

import asyncio
import json
import random
import sys

LENGTHS = (370, 130, 250)
OUTPUT = 60


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(5)
    prompts = [[2, *(rng.randrange(4, 512) for _ in range(n - 1))] for n in LENGTHS]
    engine = sglang.Engine(**engine_arguments(disable_radix_cache=True, skip_tokenizer_init=True))
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}

    async def one(number):
        parts = await engine.async_generate(
            input_ids=prompts[number], sampling_params=sampling, stream=True
        )
        async for part in parts:
            print("PART", json.dumps([number, part["output_ids"]]), flush=True)

    async def all_of_them():
        await asyncio.gather(*map(one, range(len(prompts))))

    engine.loop.run_until_complete(all_of_them())
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
