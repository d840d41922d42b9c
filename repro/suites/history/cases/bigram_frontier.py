"""A cached prompt is cut one page too short for its window, and the cache frees its own pages.

The thread's server runs EAGLE on a model with a sliding window, and pages of 64 tokens. Its key is
one shorter than the prompt, so a prompt of 1,024 tokens, which fills its last page, is cut wrongly.
Prompts of that length come, then others, and then the first ones again.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import FLAGS, Arm, case, predicted

PROMPT = 1024  # tokens
SWITCH = "SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS"


@case(
    number=3,
    title="the eviction frontier is counted in tokens and the key in pairs: cached pages are freed",
    threads=("#34823", "#34870"),
    origin=FLAGS,
    buggy=Arm("0.5.15.post1"),
    fixed=Arm("0.5.18"),
    right=Arm("0.5.15.post1", environ={SWITCH: "0"}),
    cause=(("mem_cache/unified_radix_cache.py", "cache_unfinished_req"),),
    engine={"chunked_prefill_size": 2048},
    environ={"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1", SWITCH: "1"},
    why="SGLang's own count of its pages tells this bug, too, and in its step while it is busy.",
    chosen_after=True,
    expected=predicted(
        na="strict kv-canary",
        silent="nothing compute-sanitizer core",
        alarm="sglang busy-inv tree watch",
        object="g4debug g4debug-best",
    ),
)
async def bigram_frontier(client: Client) -> None:
    first = client.prompt(PROMPT)
    await client.generate(first, 8, name="first")
    for n in range(2):
        await client.generate(client.prompt(PROMPT), 8, name=f"other-{n}")
    await client.generate(first + client.tokens(40), 16, name="again")
