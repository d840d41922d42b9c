"""FROZEN_KV_MTP dies in the draft's first forward if prefill and decode have different backends.

Two requests are enough. The backends are those that SGLang itself advises for a Blackwell
server: triton for the prefill, trtllm_mha for the decode. Verify runs on the decode's.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import FLAGS, Arm, case, predicted


@case(
    number=6,
    title="the draft's two backends keep its dummy pool when it is to read the target's",
    threads=(),
    origin=FLAGS,
    buggy=Arm("0.5.23"),
    fixed=Arm("0.5.23", fixes=("hybrid-pool-swap",)),
    cause=(
        ("layers/attention/hybrid_attn_backend.py", "__init__"),
        ("speculative/frozen_kv_mtp_utils.py", "frozen_kv_target_view"),
        ("speculative/frozen_kv_mtp_utils.py", "target_kv_pool_view"),
    ),
    engine={
        "attention_backend": None,
        "prefill_attention_backend": "triton",
        "decode_attention_backend": "trtllm_mha",
        "speculative_attention_mode": "decode",
    },
    why="The wrong pool is read before a page table is used: a crash that says nothing of its "
    "cause, in every release since 0.5.13.post1, without a thread upstream.",
    expected=predicted(
        na="kv-canary",
        crash="nothing g4debug g4debug-best sglang busy-inv strict tree compute-sanitizer core "
        "watch",
    ),
    seconds=180.0,
)
async def hybrid_pool_swap(client: Client) -> None:
    # Short prompts: on a CPU, Triton is interpreted.
    await client.batch(2, (140, 180), 12)
