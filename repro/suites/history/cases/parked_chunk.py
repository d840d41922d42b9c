"""A prompt waits for its next chunk, and holds all of the room that it waits for.

The thread's server has no prefix cache and a SWA pool that is smaller than two chunks. A burst of
16 long prompts comes to it while it is idle. Two chunks of the first one fill the pool. What lies
behind its window is given back only once a third is admitted, and there is no room for that.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import NATURAL, Arm, case, predicted

BURST, LONG = 16, (1200, 1900)  # prompts, and their tokens
SMALL_POOL = {
    "disable_radix_cache": True,
    "max_running_requests": None,
    "max_total_tokens": 8192,
    "swa_full_tokens_ratio": 0.1,
    "chunked_prefill_size": 512,
}


@case(
    number=15,
    title="a prompt waits for its next chunk, and holds the room that it waits for",
    threads=("#36458",),
    origin=NATURAL,
    buggy=Arm("0.5.23"),
    fixed=Arm("0.5.23", fixes=("parked-chunk",)),
    cause=(
        ("managers/schedule_batch.py", "maybe_evict_swa"),
        ("managers/schedule_policy.py", "add_chunked_req"),
    ),
    mtp=False,
    seconds=150.0,
    stands=60.0,
    engine=SMALL_POOL,
    why="Nothing is wrong with any page: the server turns, says nothing, and serves nobody.",
    chosen_after=True,
    expected=predicted(
        stands="nothing sglang busy-inv strict tree kv-canary compute-sanitizer",
        alarm="g4debug g4debug-best watch",
    ),
)
async def parked_chunk(client: Client) -> None:
    await client.batch(BURST, LONG, 8)
