"""The prefix cache evicts pages, one without a SWA page, and so frees the reserved page 0.

In the thread an external cache put such pages into the tree. No CPU can run one, so
``put_back/page_0_freed.py`` takes the SWA page of one page away, once, just before an eviction. The
code that then goes wrong is SGLang's own.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import PUT_BACK, Arm, case, predicted

UNPAIRED = {"G4HISTORY_PUT_BACK": "page_0_freed"}


@case(
    number=14,
    title="the eviction of a page without a SWA page frees the reserved page 0",
    threads=("#38159", "#38269", "#38519"),
    origin=PUT_BACK,
    buggy=Arm("0.5.23", environ=UNPAIRED),
    fixed=Arm("0.5.23"),
    cause=(
        ("mem_cache/allocator/swa.py", "_free_swa_pages"),
        ("mem_cache/allocator/swa.py", "_free_swa_pages_none_cuda"),
        ("mem_cache/allocator/swa.py", "free_swa_segment"),
    ),
    engine={"max_total_tokens": 4096, "swa_full_tokens_ratio": 0.5, "chunked_prefill_size": 512},
    mtp=False,
    why="SGLang's own strict invariants tell this one in its step, too. On this release no way "
    "into it was found but to clear a mapping by hand, so there is no report of it to send.",
    expected=predicted(
        silent="nothing kv-canary compute-sanitizer core",
        alarm="sglang busy-inv strict tree watch",
        object="g4debug g4debug-best",
    ),
)
async def page_0_freed(client: Client) -> None:
    # More prompts than the pool holds, so the tree evicts; the next ones get what it freed.
    for _ in range(3):
        await client.batch(4, (400, 600), 8)
