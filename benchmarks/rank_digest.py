"""Measures what the tracer rank-divergence costs a scheduler in each step, without an engine.

    python benchmarks/rank_digest.py [--steps 1000]

Two ranks in this process share the real memory, write down their next step, and compare it.
Their batches are stand-ins. What lies in device memory is not read, as on a GPU. For batch 1, 8 and
64 it prints the median time of a step, in microseconds, and below which time a tenth of them is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch


def batch(rids: tuple[str, ...], lengths: tuple[int, ...]) -> Any:
    """A decode batch. Its locations lie on a device that cannot be asked."""
    size = len(rids)
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(
                rid=rid,
                output_ids=[1] * 500,
                req_pool_idx=row,
                kv_committed_len=length,
                kv_allocated_len=length,
                swa_evicted_seqlen=row,
            )
            for row, (rid, length) in enumerate(zip(rids, lengths, strict=True))
        ],
        seq_lens_cpu=torch.tensor(lengths),
        forward_mode=SimpleNamespace(name="DECODE", is_extend=lambda: False),
        spec_info=SimpleNamespace(verified_id=torch.zeros(size), topk_p=torch.zeros(size, 2)),
        out_cache_loc=torch.zeros(size, device="meta"),
    )


def main() -> None:
    from g4debug.settings import Settings
    from g4debug.tracers.rank_divergence import canary

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    first, second, others = canary.pair(Settings(debug=True))
    for rank in (first, second):
        on_device = torch.zeros(2, 2, device="meta")
        rank.scheduler.req_to_token_pool.req_to_token = on_device
    number = 0
    for size in (1, 8, 64):
        rids = tuple(f"{i:032x}" for i in range(size))
        times = []
        for _ in range(args.steps):
            number += 1
            lengths = tuple(range(number, number + size))
            for rank in (first, second):
                run = batch(rids, lengths)
                rank.recorder.step = number - 1
                rank.recorder.begin_step(run)
                begin = time.perf_counter()
                rank.tracer.before_step(rank.scheduler, run)
                times.append((time.perf_counter() - begin) * 1e6)
        low = sorted(times)[len(times) // 10]
        print(f"batch {size:3}: median {statistics.median(times):.0f}, a tenth below {low:.0f}")
    others.close()


if __name__ == "__main__":
    main()
