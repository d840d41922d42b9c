"""Pools that are too small for the load, and schedulers that interrupt requests."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from harness.arguments import mtp_has_overlap

from suites.healthy.workload import Client, cached, finish, require, with_mtp, without_mtp, workload


def _retractions(outputs: list[Any]) -> int:
    return sum(int(o["meta_info"].get("num_retractions", 0)) for o in outputs)


@workload("retraction", "ten requests in pools for a few of them: some are retracted")
async def retracted(client: Client) -> None:
    found = await client.batch(10, (60, 200), (110, 170))
    client.note("retractions", _retractions(found))
    require(all(finish(o) == "length" for o in found), "a retracted request did not complete")


@workload("waves", "54 requests in six waves; prefixes are shared and evicted")
async def waves(client: Client) -> None:
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


@workload("forced retraction", "SGLang's `SGLANG_TEST_RETRACT`, every 5 steps")
async def tested_retraction(client: Client) -> None:
    found = await client.batch(10, (2, 200), (2, 60))
    client.note("retractions", _retractions(found))


@workload(
    "priority preemption", "four requests of high priority interrupt eight others", compare=False
)
async def preempted(client: Client) -> None:
    low = [client.start(client.prompt(150), 120, priority=0) for _ in range(8)]
    await client.decoding(4)
    high = await client.together(
        *(client.generate(client.prompt(100), 20, priority=100) for _ in range(4))
    )
    found = await asyncio.gather(*low)
    client.note("preemptions", _retractions(found))
    require(all(finish(o) == "length" for o in [*found, *high]), "a request did not complete")


@workload("mixed chunks", "three prompts of 900 tokens beside others", compare=False)
async def mixed_chunks(client: Client) -> None:
    """Long prompts are computed in chunks together with the next tokens of others."""
    running = [client.start(client.prompt(50), 120) for _ in range(3)]
    await client.decoding(3)
    await client.together(*(client.generate(client.prompt(900), 10) for _ in range(3)))
    await asyncio.gather(*running)
    # In a mixed step the requests that decode are not counted as waiting for their turn.
    steps = re.findall(r"Prefill batch, .*#running-req: [1-9]", client.log())
    client.note("steps that mix chunks and decodes", len(steps), 10)


@workload("long prompts", "up to 1,400 tokens, in chunks, alone and together")
async def long_prompts(client: Client) -> None:
    await client.generate(client.prompt(1400), 10)
    found = await client.batch(4, (600, 1200), 20)
    client.note("prompts of several chunks", 1 + len(found), 5)


SMALL = {"max_total_tokens": 1536, "swa_full_tokens_ratio": 0.6}
PRESSED = (retracted, waves, long_prompts)
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
PRIORITY = {"enable_priority_scheduling": True, "max_running_requests": 4}

# Without a prefix cache SGLang knows how long such requests become, and lets only so many in that
# all of them fit. With v1, which also needs pages for its drafts, that is too many.
RETRACTS = not mtp_has_overlap()

GROUPS = (
    with_mtp("small-pools", "small pools, MTP, prefix cache", PRESSED, SMALL),
    with_mtp(
        "small-pools-no-radix",
        "small pools, MTP, no prefix cache",
        PRESSED if RETRACTS else (tested_retraction, *PRESSED[1:]),
        {**SMALL, "disable_radix_cache": True},
        environ={} if RETRACTS else RETRACT,
        strict=False,
        why="SGLang's busy check is wrong after a retraction here, without g4debug, too",
    ),
    without_mtp("small-pools-plain", "small pools, no MTP, prefix cache", PRESSED, SMALL),
    with_mtp("retract", "forced retraction, MTP", (tested_retraction,), environ=RETRACT),
    without_mtp(
        "retract-plain", "forced retraction, no MTP", (tested_retraction,), environ=RETRACT
    ),
    with_mtp("priority", "priority scheduling, MTP", (preempted,), PRIORITY),
    without_mtp("priority-plain", "priority scheduling, no MTP", (preempted,), PRIORITY),
    without_mtp(
        "mixed-chunk",
        "mixed chunks, no MTP (SGLang switches them off with it)",
        (mixed_chunks,),
        {"enable_mixed_chunk": True, "chunked_prefill_size": 128},
    ),
)
