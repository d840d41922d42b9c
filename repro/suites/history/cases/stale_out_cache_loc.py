"""FROZEN_KV_MTP without CUDA graphs dies in its first decode: the draft has the prefill's slots."""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import NATURAL, Arm, case, predicted


@case(
    number=7,
    title="the draft's batch keeps the places to which the prefill wrote",
    threads=("#28264", "#28817", "#29616"),
    origin=NATURAL,
    buggy=Arm("0.5.14"),
    fixed=Arm("0.5.15.post1"),
    cause=(("speculative/frozen_kv_mtp_worker_v2.py", "draft"),),
    why="A crash of shapes at the first decode, on a release that no tracer was run on: a tool "
    "that guesses here does harm.",
    expected=predicted(
        na="g4debug strict tree kv-canary",
        crash="nothing g4debug-best sglang busy-inv compute-sanitizer core watch",
    ),
)
async def stale_out_cache_loc(client: Client) -> None:
    # The first one is alone, as in the thread: when two prefills are merged, the places are reset.
    await client.batch(1, (20, 300), 16)
    await client.batch(2, (20, 300), 16)
