"""Driven by an engine test: requests that share a prefix, are chunked, retracted and aborted.

Prints ``RESULT`` with what SGLang says of each that has ended, and then goes on with ``lives``.
"""

import asyncio
import json
import random
import sys

SMALL = {"max_total_tokens": 1536, "swa_full_tokens_ratio": 0.6, "chunked_prefill_size": 128}
SHARED, LONG = 320, 1150


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    rng = random.Random(7)
    engine = sglang.Engine(**engine_arguments(**SMALL))

    def tokens(count):
        return [rng.randrange(4, 512) for _ in range(count)]

    async def ask(rid, prompt, longest):
        sampling = {"temperature": 0, "max_new_tokens": longest, "ignore_eos": True}
        found = await engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=rid)
        return {"rid": rid, "prompt": len(prompt), **found["meta_info"]}

    async def stream(rid, prompt, longest, until, ready):
        sampling = {"temperature": 0, "max_new_tokens": longest, "ignore_eos": True}
        found = await engine.async_generate(
            input_ids=prompt, sampling_params=sampling, rid=rid, stream=True
        )
        async for one in found:
            last = {"rid": rid, "prompt": len(prompt), **one["meta_info"]}
            if last["completion_tokens"] >= until:
                ready(last)
                until = 1 << 30
        return last

    async def drive():
        common = [2, *tokens(SHARED - 1)]
        ended = [await ask("first", common + tokens(90), 8)]
        ended.append(await ask("shared", common + tokens(200), 20))
        many = [(f"many-{i}", [2, *tokens(rng.randrange(60, 200))], rng.randrange(110, 170))
                for i in range(10)]  # fmt: skip
        ended += await asyncio.gather(*(ask(*one) for one in many))

        def abort(last):
            engine.tokenizer_manager.abort_request(rid="aborted")

        ended.append(await stream("aborted", [2, *tokens(150)], 600, 10, abort))
        kept = ("rid", "prompt", "cached_tokens", "completion_tokens", "num_retractions",
                "finish_reason", "spec_verify_ct")  # fmt: skip

        def tell(last):
            told = [{name: one.get(name) for name in kept} for one in ended]
            print("RESULT", json.dumps(told), flush=True)

        await stream("lives", [2, *tokens(200)], LONG, 20, tell)

    engine.loop.run_until_complete(drive())
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
