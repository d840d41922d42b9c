"""Driven by engine tests, in a process of its own: a server that stands, or only looks so.

``drive_standing.py SCENARIO [SECONDS]``. It prints ``RESULT`` and what each request came to:
``served``, or ``stands`` if it was not served within ``SECONDS``.
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

    async def ask(self, rid, prompt, output=8, seconds=None, asked=(), **more):
        """Its output, or None if it was not served in time; then it is aborted. asked: more
        arguments of SGLang's, beside its sampling parameters."""
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": False, **more}
        given = {"input_ids": prompt, "sampling_params": sampling, "rid": rid, **dict(asked)}
        asked = self.engine.async_generate(**given)
        try:
            answer = await asyncio.wait_for(asked, seconds or self.seconds)
        except TimeoutError:
            self.results[rid] = "stands"
            self.engine.tokenizer_manager.abort_request(rid)
            return None
        self.results[rid] = "served"
        return answer["output_ids"]


@scenario(chunked_prefill_size=512, disable_radix_cache=True, **SWA)
async def parked_chunk(client):
    """sglang #36458."""
    await client.ask("long", tokens(1600))


@scenario(chunked_prefill_size=512, disable_radix_cache=True, tp_size=2, **SWA)
async def parked_chunk_on_two_ranks(client):
    await client.ask("long", tokens(1600))


@scenario(chunked_prefill_size=1024, **SWA)
async def resume(client):
    """sglang #32379."""
    first = tokens(500)
    answer = await client.ask("turn-1", first)
    await client.ask("turn-2", first + answer + tokens(210))


@scenario(chunked_prefill_size=64)
async def healthy(client):
    """What looks like a hang to a clock: each lasts longer than G4DEBUG_HANG_SECONDS."""
    from sglang.srt.managers import io_struct

    wait, manager = client.seconds, client.engine.tokenizer_manager
    await client.ask("first", tokens(100), seconds=300)
    await asyncio.sleep(wait)  # no traffic
    for mode in ("in_place", "retract"):
        asked = asyncio.create_task(client.ask(mode, tokens(100), 200, seconds=300))
        later = asyncio.create_task(client.ask(f"{mode}-2", tokens(50), 4, seconds=300))
        await asyncio.sleep(0.5)
        await manager.pause_generation(io_struct.PauseGenerationReqInput(mode=mode))
        await asyncio.sleep(wait)
        await manager.continue_generation(io_struct.ContinueGenerationReqInput())
        await asked
        await later
    decodes = asyncio.create_task(client.ask("decodes", tokens(60), 100, seconds=300))
    await client.ask("long-prompt", tokens(1900), 4, seconds=300)
    await decodes
    await client.ask("stopped", tokens(100), 1500, seconds=1)  # the client goes away
    client.results["stopped"] = "served"
    await asyncio.sleep(2)
    path = client.engine.server_args.model_path
    update = io_struct.UpdateWeightFromDiskReqInput(model_path=path)
    await manager.update_weights_from_disk(update, None)
    await client.ask("last", tokens(100))


@scenario(schedule_policy="lpm", max_running_requests=1)
async def overtaken(client):
    """The policy lets everybody with a cached prefix go first, who comes later, too."""
    shared, in_time = tokens(256), {"seconds": 600}  # nobody stands here, on a slow machine neither
    await client.ask("warm", shared, 2, **in_time)
    runs = client.ask("runs", shared + tokens(8), 100, **in_time, ignore_eos=True)
    unlike = client.ask("unlike", tokens(300), 4, **in_time)
    others = (
        client.ask(f"other-{n}", shared + tokens(8), 60, **in_time, ignore_eos=True)
        for n in range(16)
    )
    await asyncio.gather(runs, unlike, *others)


DECODE = {
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
    "disaggregation_decode_retraction_backup": "cpu_tensor",  # the other one pins host memory
}


def from_elsewhere(room):
    """A request whose prefill another server has done: SGLang's own stand-in for one."""
    return {"bootstrap_host": "2.2.2.2", "bootstrap_room": room}


@scenario(**DECODE, **SWA)
async def received(client):
    """A decode server of disaggregation under load, idle, and under load again."""
    for wave in range(2):
        asked = [
            client.ask(
                f"{wave}-{n}", tokens(60 + 40 * n), 20 + 20 * n, seconds=300,
                asked=from_elsewhere(10 * wave + n), ignore_eos=True,
            )
            for n in range(8)
        ]  # fmt: skip
        await asyncio.gather(*asked)
        await asyncio.sleep(client.seconds)


@scenario(**DECODE, **SWA)
async def no_room(client):
    """SGLang holds all that a request may generate against the SWA pool, before it is received."""
    await client.ask("some", tokens(100), seconds=300, asked=from_elsewhere(1))
    await client.ask("much", tokens(100), 1500, asked=from_elsewhere(2))
    await client.ask("again", tokens(100), seconds=300, asked=from_elsewhere(3))


@scenario(**DECODE, **SWA)
async def never_sent(client):
    """The other server does not answer: its address is one of nobody."""
    await client.ask(
        "lost",
        tokens(100),
        asked={"bootstrap_host": "127.0.0.1", "bootstrap_room": 1, "bootstrap_port": 9},
    )


def main():
    import sglang

    from g4debug.cpu.server import engine_arguments

    what, arguments = SCENARIOS[sys.argv[1]]
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    engine = sglang.Engine(**engine_arguments(mtp=False, **arguments))
    client = Client(engine, seconds)
    engine.loop.run_until_complete(what(client))
    print("RESULT", json.dumps(client.results), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
