"""A cached prefix loses its full pages while a request reads them, and its answer is wrong.

The thread's users run coding agents: many conversations that start with the same system prompt,
turn after turn, on a server whose sliding-window pool is nearly full. Here one agent writes a long
answer. Meanwhile strangers come with prompts of their own, and now and then another agent comes
with the system prompt.
"""

from __future__ import annotations

import asyncio

from _healthy.workload import Client
from _history.case import NATURAL, Arm, Case
from _history.grades import CAUSE, NA, SILENT

SYSTEM, TASK = 256, 192  # tokens
ROUNDS, STRANGERS = 2, 3


async def drive(client: Client, seed: int) -> None:
    system = client.prompt(SYSTEM)
    await client.generate(system + client.tokens(TASK), 4, name="first-agent")
    writes = asyncio.ensure_future(
        client.generate(system + client.tokens(TASK), 96, name="long-answer")
    )
    await client.decoding(1)
    for n in range(ROUNDS):
        for m in range(STRANGERS):
            await client.generate(client.prompt(320), 3, name=f"stranger-{n}-{m}")
        await client.generate(system + client.tokens(64), 3, name=f"agent-{n}")
    await writes


CASE = Case(
    number=1,
    title="a cached prefix loses its full pages while a running request reads them",
    threads=("#29352",),
    origin=NATURAL,
    buggy=Arm("0.5.12.post1"),
    fixed=Arm("0.5.12.post1", fixes=("locked-prefix",)),
    cause=(("mem_cache/swa_radix_cache.py", "_insert_helper"),),
    drive=drive,
    mtp=False,
    seconds=240.0,
    engine={
        "max_total_tokens": 4096,
        "swa_full_tokens_ratio": 0.3,
        "max_running_requests": 2,
        "chunked_prefill_size": 512,
    },
    why="A page is freed while a request reads it, no count is wrong, and nothing ever crashes.",
    expected={
        "nothing": SILENT,
        "g4debug": CAUSE,
        "g4debug-best": CAUSE,
        "sglang": SILENT,
        "busy-inv": SILENT,
        "strict": NA,
        "tree": SILENT,
        "kv-canary": NA,
        "compute-sanitizer": SILENT,
    },
)
