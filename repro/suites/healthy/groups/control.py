"""An operator's actions on a running server: pause, flush, new weights, memory given back."""

from __future__ import annotations

import asyncio
from typing import Any

from suites.healthy.workload import (
    DEFAULT_LIMITS,
    Client,
    cached,
    finish,
    require,
    with_mtp,
    without_mtp,
    workload,
)


async def _pause(client: Client, mode: str) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    await client.manager.pause_generation(PauseGenerationReqInput(mode=mode))


async def _go_on(client: Client) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    await client.manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


async def _started(client: Client, count: int = 5) -> list[Any]:
    """Requests that run now."""
    tasks = [client.start(client.prompt(client.between(50, 300)), 150) for _ in range(count)]
    await client.decoding(count)
    require(not any(t.done() for t in tasks), "the requests ended before the server was paused")
    return tasks


async def _paused(client: Client, mode: str, times: int, between: float) -> list[Any]:
    """Answers during which the server is paused. between: seconds from one pause to the next."""
    tasks = await _started(client)
    for _ in range(times):
        await _pause(client, mode)
        await asyncio.sleep(0.5)
        await _go_on(client)
        await asyncio.sleep(between)
    found = await asyncio.gather(*tasks)
    require(all(finish(o) == "length" for o in found), "a paused request did not complete")
    return found


@workload("pause, in place", "three times in the middle of five answers")
async def paused_in_place(client: Client) -> None:
    await _paused(client, "in_place", 3, 0.3)
    client.note("pauses", 3)


@workload("pause, retract", "twice in the middle of five answers", compare=False)
async def paused_and_retracted(client: Client) -> None:
    found = await _paused(client, "retract", 2, 0.5)
    client.note("retractions", sum(o["meta_info"]["num_retractions"] for o in found), 5)


@workload("pause, abort", "in the middle of five answers", compare=False)
async def paused_and_aborted(client: Client) -> None:
    tasks = await _started(client)
    await _pause(client, "abort")
    found = await asyncio.gather(*tasks)
    client.note("aborted", sum(finish(o) == "abort" for o in found), 4)
    await _go_on(client)
    await client.batch(4)


async def _load(client: Client, flush: bool) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    path = client.engine.server_args.model_path
    asked = UpdateWeightFromDiskReqInput(model_path=path, flush_cache=flush)
    done = await client.manager.update_weights_from_disk(asked, None)
    require(bool(done[0]), f"SGLang did not load the weights: {done[1]}")


@workload(
    "weight update", "`update_weights_from_disk`, at idle and while paused (abort)", compare=False
)
async def new_weights(client: Client) -> None:
    async def load() -> None:
        await asyncio.sleep(0.3)  # SGLang flushes its cache then, and wants to be idle for that
        await _load(client, True)
        client.note("updates", 1)

    prompt = client.prompt(200)
    first = await client.generate(prompt, 20)
    await load()
    again = await client.generate(prompt, 20)
    require(first["output_ids"] == again["output_ids"], "the same weights gave other tokens")
    tasks = await _started(client)
    await _pause(client, "abort")
    await asyncio.gather(*tasks)
    await load()
    await _go_on(client)
    await client.batch(4)


@workload(
    "weight update, in place",
    "while paused (in place), without a flush: answers go on",
    compare=False,
)
async def weights_in_place(client: Client) -> None:
    tasks = await _started(client)
    await _pause(client, "in_place")
    await _load(client, False)
    await _go_on(client)
    found = await asyncio.gather(*tasks)
    client.note("requests that went on", sum(finish(o) == "length" for o in found), 5)


@workload("flush_cache", "three times at idle; refused while busy")
async def flushed(client: Client) -> None:
    prompt = client.prompt(300)
    await client.generate(prompt, 10)
    for _ in range(3):
        warm = await client.generate(prompt, 10)
        done = await client.manager.flush_cache(timeout_s=5)  # once the server is idle
        require(bool(done.success), "the cache was not flushed")
        cold = await client.generate(prompt, 10)
        require(cached(cold) == 0, "the prefix was still cached after the flush")
        client.note("prompt tokens cached before a flush", cached(warm), 0)
        client.note("flushes", 1)
    tasks = await _started(client, 2)
    done = await client.manager.flush_cache()
    require(not done.success, "a busy server was flushed")
    await asyncio.gather(*tasks)


@workload(
    "release and resume memory",
    "KV, weights and both; without torch_memory_saver only KV is dropped",
)
async def memory_released(client: Client) -> None:
    from sglang.srt.managers.io_struct import (
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
    )

    for tags in (["kv_cache"], None, ["weights"]):
        await client.batch(4)
        await asyncio.sleep(0.3)  # SGLang wants to be idle
        await client.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
        await client.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
        await client.batch(4)
        client.note("releases", 1)


QUIET = 30.0  # seconds


@workload("no traffic", "for 30 s, and requests again; a hang is 20 s with MTP, and 5 s without")
async def no_traffic(client: Client) -> None:
    await client.batch(4)
    await asyncio.sleep(QUIET)
    await client.batch(4)
    client.note("seconds without a request", round(QUIET))


@workload("a long pause", "in place, for 30 s, in the middle of five answers; a hang as above")
async def long_pause(client: Client) -> None:
    tasks = await _started(client)
    await _pause(client, "in_place")
    await asyncio.sleep(QUIET)
    await _go_on(client)
    found = await asyncio.gather(*tasks)
    client.note("requests that went on", sum(finish(o) == "length" for o in found), 5)


CONTROLS = (paused_in_place, paused_and_retracted, paused_and_aborted, flushed, memory_released)
WEIGHTS = (new_weights, weights_in_place)

GROUPS = (
    with_mtp("control", "MTP, prefix cache", CONTROLS),
    without_mtp("control-plain", "no MTP, prefix cache", (*CONTROLS, *WEIGHTS)),
    with_mtp(
        "quiet",
        "nothing to do for longer than a hang, MTP",
        (no_traffic, long_pause),
        environ=DEFAULT_LIMITS,
    ),
    without_mtp(
        "quiet-plain", "nothing to do for longer than a hang, no MTP", (no_traffic, long_pause)
    ),
    with_mtp(
        "weights-mtp",
        "weight updates with MTP: SGLang gives the assistant the weights of the target",
        (WEIGHTS[0],),
        refused="Attempted to load weight (torch.Size([512, 64])) into parameter",
    ),
)
