"""The draft's trtllm_mha backend believes that it reads its dummy pool, and sees no SWA pool.

The thread's server died of an illegal memory access with FROZEN_KV_MTP on a hybrid model under
load. Here the SWA pool has half as many pages as the full one, and the prefix cache keeps more
full pages than that, so a page of the full pool is soon behind the end of the SWA pool.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import PUT_BACK, Arm, case, predicted


@case(
    number=12,
    title="the draft's backend does not know that the pool it reads is a SWA pool",
    threads=("#26957", "#26966"),
    origin=PUT_BACK,
    buggy=Arm("0.5.23", faults="stale-swa-state=1*on"),
    fixed=Arm("0.5.23"),
    cause=(
        ("layers/attention/trtllm_mha_backend.py", "__init__"),
        ("layers/attention/trtllm_mha_backend.py", "_resolve_swa_kv_pool"),
    ),
    engine={"max_total_tokens": 4096, "swa_full_tokens_ratio": 0.5, "chunked_prefill_size": 512},
    why="The pages are right and the table is of the wrong pool. It was on upstream's main branch "
    "from 2026-05-15 to 2026-06-02 and is put back by g4debug's own fault stale-swa-state.",
    expected=predicted(
        na="kv-canary",
        crash="nothing sglang busy-inv strict tree",
        silent="core",
        alarm="compute-sanitizer watch",
        object="g4debug g4debug-best",
    ),
)
async def stale_swa_state(client: Client) -> None:
    for _ in range(2):
        await client.batch(4, (350, 500), 16)
