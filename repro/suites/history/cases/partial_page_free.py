"""The last page of a request is freed in two calls, and the second one frees it again.

In 0.5.12.post1 nothing outside of HiCache makes two calls, so ``put_back/partial_page_free.py``
does. The code that then goes wrong is SGLang's own. On 0.5.14 the same two calls are harmless.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import PUT_BACK, Arm, case, predicted

TWO_CALLS = {"G4HISTORY_PUT_BACK": "partial_page_free"}


@case(
    number=13,
    title="a SWA page that is freed in two parts is freed twice",
    threads=("#27779", "#27789"),
    origin=PUT_BACK,
    buggy=Arm("0.5.12.post1"),
    fixed=Arm("0.5.14"),
    cause=(
        ("mem_cache/swa_memory_pool.py", "free_swa"),
        ("mem_cache/allocator/swa.py", "free_swa"),
    ),
    environ=TWO_CALLS,
    mtp=False,
    right=Arm("0.5.12.post1", environ={"G4HISTORY_PUT_BACK": ""}),
    why="The oldest kind of allocator bug: one page twice in the list of free pages, and later "
    "two requests that share it.",
    expected=predicted(
        na="strict tree kv-canary",
        silent="nothing compute-sanitizer core",
        late="sglang watch",
        alarm="busy-inv",
        object="g4debug g4debug-best",
    ),
)
async def partial_page_free(client: Client) -> None:
    await client.batch(12, (70, 300), (4, 30))
