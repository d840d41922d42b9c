"""Driven by engine tests, in a process of its own: a server that stands, or only looks so.

``drive_standing.py SCENARIO [SECONDS]``. It prints ``RESULT`` and what each request came to:
``served``, or ``stands`` if it was not served within ``SECONDS``. Then it aborts what stands.
"""

import asyncio
import json
import random
import sys

SWA = {"max_total_tokens": 8192, "swa_full_tokens_ratio": 0.1, "max_running_requests": None}
SCENARIOS = {}
_rng = random.Random(3)


def tokens(n):
    return [_rng.randrange(4, 512) for _ in range(n)]


def scenario(**arguments):
    def add(function):
        SCENARIOS[function.__name__] = (function, arguments)
        return function

    return add


class Client:
    def __init__(self, engine, seconds):
        self.engine, self.seconds, self.results = engine, seconds, {}

    async def ask(self, rid, prompt, output=8, **more):
        """Its output, or None if it stands."""
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": False, **more}
        asked = self.engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=rid)
        try:
            answer = await asyncio.wait_for(asked, self.seconds)
        except TimeoutError:
            self.results[rid] = "stands"
            return None
        self.results[rid] = "served"
        return answer["output_ids"]


@scenario(chunked_prefill_size=512, disable_radix_cache=True, **SWA)
async def parked_chunk(client):
    """sglang #36458."""
    await client.ask("long", tokens(1600))


@scenario(chunked_prefill_size=1024, **SWA)
async def resume(client):
    """sglang #32379."""
    first = tokens(500)
    answer = await client.ask("turn-1", first)
    await client.ask("turn-2", first + answer + tokens(210))


async def run(client, what):
    await what(client)
    for rid, result in client.results.items():
        if result == "stands":
            client.engine.abort_request(rid) if hasattr(client.engine, "abort_request") else None


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    what, arguments = SCENARIOS[sys.argv[1]]
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    given = engine_arguments(mtp=False, **arguments)
    given = {name: value for name, value in given.items() if value is not None}
    engine = sglang.Engine(**given)
    client = Client(engine, seconds)
    engine.loop.run_until_complete(run(client, what))
    print("RESULT", json.dumps(client.results), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
