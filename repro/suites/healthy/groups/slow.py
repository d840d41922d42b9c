"""What takes long on a healthy server although nothing is stuck: a first request, a slow reader."""

from __future__ import annotations

import asyncio
import time

from suites.healthy.workload import (
    DEFAULT_LIMITS,
    Client,
    finish,
    require,
    with_mtp,
    without_mtp,
    workload,
)

COMPILES, AGAIN, RESTS = 120, 60, 30  # seconds
STEPS = 60  # behind the first one, before it compiles again: more than ``first_request`` has


@workload(
    "a first request that compiles kernels",
    f"{COMPILES} s in its first forward, while five others wait; a hang is 20 s",
)
async def first_request(client: Client) -> None:
    began = time.monotonic()
    first = client.start(client.prompt(100), 20)
    await asyncio.sleep(1)
    others = [client.start(client.prompt(client.between(50, 300)), 20) for _ in range(5)]
    found = await asyncio.gather(first, *others)
    waited = time.monotonic() - began
    require(waited >= COMPILES, f"all was answered after {waited:.0f} s")
    require(all(finish(o) == "length" for o in found), "a request did not complete")
    client.note("seconds in a first forward", COMPILES)
    client.note("requests that waited for it", len(others))


@workload(
    "a compiler in the middle of the work",
    f"{AGAIN} s in one step of a server whose pace is known, while a compiler runs; a hang is 20 s",
)
async def later_compiler(client: Client) -> None:
    """Here the flight recorder would tell a hang after 20 s, but for what busy.py knows."""
    began = time.monotonic()
    found = await client.batch(4, (50, 100), 200)
    waited = time.monotonic() - began
    require(waited >= AGAIN, f"all was answered after {waited:.0f} s")
    require(all(finish(o) == "length" for o in found), "a request did not complete")
    client.note("seconds in a step that compiles", AGAIN)
    client.note("requests that waited for it", len(found))


@workload("a client that stops reading", f"for {RESTS} s, in the middle of a streamed answer")
async def stopped_client(client: Client) -> None:
    pieces = await client.stream(client.prompt(150), 60)
    for _ in range(3):
        await anext(pieces)
    await asyncio.sleep(RESTS)
    await client.batch(4)
    rest = [piece async for piece in pieces]
    require(finish(rest[-1]) == "length", "the answer was not completed")
    client.note("seconds without a reader", RESTS)


WORKLOADS = (first_request, later_compiler, stopped_client)
FAULT = f"delayed-step=1*on({1000 * COMPILES})->{STEPS}*off->1*compiles({1000 * AGAIN})@mode=decode"
ENVIRON = {**DEFAULT_LIMITS, "G4DEBUG_FAULTS": FAULT}

GROUPS = (
    with_mtp(
        "slow-first",
        "a first forward that takes minutes, and a later one (the fault `delayed-step`), MTP",
        WORKLOADS,
        environ=ENVIRON,
    ),
    without_mtp(
        "slow-first-plain",
        "a first forward that takes minutes, and a later one (the fault `delayed-step`), no MTP",
        WORKLOADS,
        environ=ENVIRON,
    ),
)
