"""A cached prefix loses its full pages while a request reads them, and its answer is wrong.

The thread's users run coding agents: many conversations that start with the same system prompt,
turn after turn, on a server with a sliding-window pool that is nearly full. Here one agent writes a
long answer. Meanwhile strangers come with prompts of their own, and now and then another agent
comes with the system prompt.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import NATURAL, Arm, case, predicted

SYSTEM, TASK = 256, 192  # tokens
STRANGERS = 3  # in a round
NEARLY_FULL = {
    "max_total_tokens": 4096,
    "swa_full_tokens_ratio": 0.3,
    "max_running_requests": 2,
    "chunked_prefill_size": 512,
}


async def agents(client: Client, rounds: int, answer: int, task: int, tokens: int) -> None:
    """A long ``answer``; meanwhile strangers, and another agent in each round.

    task: the tokens that an agent adds to the system prompt. tokens: of its answer.
    """
    system = client.prompt(SYSTEM)
    await client.generate(system + client.tokens(TASK), 4, name="first-agent")
    writes = client.start(system + client.tokens(TASK), answer, name="long-answer")
    await client.decoding(1)
    for n in range(rounds):
        for m in range(STRANGERS):
            await client.generate(client.prompt(320), 3, name=f"stranger-{n}-{m}")
        await client.generate(system + client.tokens(task), tokens, name=f"agent-{n}")
    await writes


@case(
    number=1,
    title="a cached prefix loses its full pages while a running request reads them",
    threads=("#29352",),
    origin=NATURAL,
    buggy=Arm("0.5.12.post1"),
    fixed=Arm("0.5.12.post1", fixes=("locked-prefix",)),
    cause=(("mem_cache/swa_radix_cache.py", "_insert_helper"),),
    mtp=False,
    engine=NEARLY_FULL,
    why="A page is freed while a request reads it, no count is wrong, and nothing ever crashes.",
    expected=predicted(
        na="strict kv-canary",
        silent="nothing sglang busy-inv tree compute-sanitizer core watch",
        cause="g4debug g4debug-best",
    ),
)
async def locked_prefix(client: Client) -> None:
    await agents(client, rounds=2, answer=96, task=64, tokens=3)
