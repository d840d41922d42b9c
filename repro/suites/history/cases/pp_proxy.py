"""FROZEN_KV_MTP without overlap scheduling dies of its first request: no page has a part in it."""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import FLAGS, Arm, case, predicted


@case(
    number=8,
    title="the scheduler hands the worker an argument that it does not know",
    threads=("#40155", "#40355"),
    origin=FLAGS,
    buggy=Arm("0.5.23", engine={"disable_overlap_schedule": True}),
    fixed=Arm("0.5.23"),
    cause=(
        ("speculative/frozen_kv_mtp_worker_v2.py", "forward_batch_generation"),
        ("managers/scheduler.py", "run_batch"),
    ),
    why="The negative control: it is no bug of the KV cache, so a tool that accuses a page lies.",
    expected=predicted(
        na="kv-canary",
        crash="nothing g4debug g4debug-best sglang busy-inv strict tree compute-sanitizer core "
        "watch",
    ),
)
async def pp_proxy(client: Client) -> None:
    await client.batch(3, (20, 200), 16)
