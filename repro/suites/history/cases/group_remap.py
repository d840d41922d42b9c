"""A cached prefix gets new SWA pages, and the end of the free group takes them away again.

The threads' servers serve bursts of requests that share a system prompt, until SGLang says that one
SWA page is missing. Here two of them arrive while another prompt is computed, so they are computed
in one batch: a long one first, then a short one. Afterwards others need their place in the cache.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import NATURAL, Arm, case, predicted

SYSTEM, BUSY, BURSTS, OTHERS = 256, 1500, 3, 5
PREFILL = "Prefill batch"


@case(
    number=2,
    title="a free group frees the SWA pages that a cached prefix has just been given",
    threads=("#36081", "#36135", "#36381", "#36646"),
    origin=NATURAL,
    buggy=Arm("0.5.18"),
    fixed=Arm("0.5.23"),
    right=Arm("0.5.18", engine={"disable_radix_cache": True}),
    cause=(
        ("mem_cache/allocator/swa.py", "free_swa"),
        ("mem_cache/allocator/swa.py", "free_group_end"),
    ),
    mtp=False,
    engine={"max_total_tokens": 4096, "chunked_prefill_size": 2048, "max_prefill_tokens": 2048},
    why="Answers are wrong at once, and a count that is one page short says so much later.",
    chosen_after=True,
    # kv-canary reads the SWA half of the map, where the place is 0
    expected=predicted(
        na="g4debug strict",
        silent="nothing compute-sanitizer core",
        late="sglang busy-inv tree watch",
        alarm="kv-canary",
        object="g4debug-best",
    ),
)
async def group_remap(client: Client) -> None:
    for n in range(BURSTS):
        system = client.prompt(SYSTEM)
        long, short = system + client.tokens(384), system + client.tokens(64)
        before = client.log().count(PREFILL)
        busy = client.start(client.prompt(BUSY), 2, name=f"busy-{n}")
        await client.until(PREFILL, before + 1)
        await client.together(
            client.generate(long, 12, name=f"long-{n}"),
            client.generate(short, 12, name=f"short-{n}"),
        )
        await busy
    for n in range(OTHERS):
        await client.generate(client.prompt(640), 2, name=f"other-{n}")
