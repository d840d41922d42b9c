"""Pools that are too small for what runs, and schedulers that interrupt requests."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from harness.arguments import mtp_has_overlap

from suites.healthy.workload import Client, Workload, cached, finish, require, with_mtp, without_mtp


def _retractions(outputs: list[Any]) -> int:
    return sum(int(o["meta_info"].get("num_retractions", 0)) for o in outputs)


async def retracted(client: Client) -> None:
    found = await client.batch(10, (60, 200), (110, 170))
    client.note("retractions", _retractions(found))
    require(all(finish(o) == "length" for o in found), "a retracted request did not complete")


async def waves(client: Client) -> None:
    """Six waves of requests with common prefixes; between them the server is idle."""
    prefixes = [client.prompt(220) for _ in range(3)]
    for _ in range(6):
        found = await client.together(
            *(
                client.generate(
                    prefixes[i % 3][: client.between(60, 220)] + client.tokens(30),
                    client.between(2, 60),
                )
                for i in range(9)
            )
        )
        client.note("prompt tokens from the prefix cache", sum(map(cached, found)), 0)
        await asyncio.sleep(0.1)
    client.note("waves", 6)


async def tested_retraction(client: Client) -> None:
    """SGLang's own switch for tests retracts every few steps."""
    found = await client.batch(10, (2, 200), (2, 60))
    client.note("retractions", _retractions(found))


async def preempted(client: Client) -> None:
    """Requests of a high priority come while the server is full with others."""
    low = [
        asyncio.ensure_future(client.generate(client.prompt(150), 120, priority=0))
        for _ in range(8)
    ]
    await client.decoding(4)
    high = await client.together(
        *(client.generate(client.prompt(100), 20, priority=100) for _ in range(4))
    )
    found = await asyncio.gather(*low)
    client.note("preemptions", _retractions(found))
    require(all(finish(o) == "length" for o in [*found, *high]), "a request did not complete")


async def mixed_chunks(client: Client) -> None:
    """Long prompts are computed in chunks together with the next tokens of others."""
    running = [asyncio.ensure_future(client.generate(client.prompt(50), 120)) for _ in range(3)]
    await client.decoding(3)
    await client.together(*(client.generate(client.prompt(900), 10) for _ in range(3)))
    await asyncio.gather(*running)
    # In a mixed step the requests that decode are not counted as waiting for their turn.
    steps = re.findall(r"Prefill batch, .*#running-req: [1-9]", client.log())
    client.note("steps that mix chunks and decodes", len(steps), 10)


async def long_prompts(client: Client) -> None:
    """Prompts of many chunks and several windows, alone and together."""
    await client.generate(client.prompt(1400), 10)
    found = await client.batch(4, (600, 1200), 20)
    client.note("prompts of several chunks", 1 + len(found), 5)


SMALL = {"max_total_tokens": 1536, "swa_full_tokens_ratio": 0.6}
PRESSED = (
    Workload(
        "retraction", "ten requests in pools for a few of them: some are retracted", retracted
    ),
    Workload("waves", "54 requests in six waves; prefixes are shared and evicted", waves),
)
LONG = Workload("long prompts", "up to 1,400 tokens, in chunks, alone and together", long_prompts)
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
FORCED = Workload(
    "forced retraction", "SGLang's `SGLANG_TEST_RETRACT`, every 5 steps", tested_retraction
)
PREEMPTED = Workload(
    "priority preemption",
    "four requests of high priority interrupt eight others",
    preempted,
    compare=False,
)
PRIORITY = {"enable_priority_scheduling": True, "max_running_requests": 4}

# Without a prefix cache SGLang knows how long such requests become, and lets only so many in that
# all of them fit. With v1, which also needs pages for its drafts, that is too many.
RETRACTS = not mtp_has_overlap()

GROUPS = (
    with_mtp("small-pools", "small pools, MTP, prefix cache", (*PRESSED, LONG), SMALL),
    with_mtp(
        "small-pools-no-radix",
        "small pools, MTP, no prefix cache",
        (*PRESSED, LONG) if RETRACTS else (FORCED, *PRESSED[1:], LONG),
        {**SMALL, "disable_radix_cache": True},
        environ={} if RETRACTS else RETRACT,
        strict=False,
        why="SGLang's busy check is wrong after a retraction here, without g4debug, too",
    ),
    without_mtp("small-pools-plain", "small pools, no MTP, prefix cache", (*PRESSED, LONG), SMALL),
    with_mtp("retract", "forced retraction, MTP", (FORCED,), environ=RETRACT),
    without_mtp("retract-plain", "forced retraction, no MTP", (FORCED,), environ=RETRACT),
    with_mtp("priority", "priority scheduling, MTP", (PREEMPTED,), PRIORITY),
    without_mtp("priority-plain", "priority scheduling, no MTP", (PREEMPTED,), PRIORITY),
    without_mtp(
        "mixed-chunk",
        "mixed chunks, no MTP (SGLang switches them off with it)",
        (
            Workload(
                "mixed chunks", "three prompts of 900 tokens beside others", mixed_chunks, False
            ),
        ),
        {"enable_mixed_chunk": True, "chunked_prefill_size": 128},
    ),
)
