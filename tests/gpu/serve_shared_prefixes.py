"""Driven by test_prefix_cache_gpu.py: ``... DEVICE RESULT.json ALONE MANY LONGEST_ANSWER``.

An engine with E4B's layers, but few of them and a small vocabulary, on split backends and with
CUDA graphs of a few batch sizes; or the toy model on the CPU engine, to try the test itself. First
ALONE requests one at a time. Then MANY at once, which share prefixes and do not fit into the pools.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "repro"))

RUNNING = 12
# Prompts that are longer than a chunk and than the window, and that share up to two thirds.
LONGEST = {"cpu": 330, "cuda": 1300}


def engine(device: str) -> dict[str, Any]:
    """Arguments of ``sgl.Engine``: pools that a third of the running requests fit into."""
    from harness import mixed

    if device == "cpu":
        return mixed.engine(max_running_requests=RUNNING, max_total_tokens=1536)
    from harness.workload import in_memory
    from workloads.e4b_trtllm_mtp import cuda

    from g4debug.cpu.geometry import E4B_256
    from g4debug.cpu.models import write

    shallow = replace(E4B_256, pattern="ssfsssf", kv_shared=4, vocab=32_768)
    models = write(shallow, in_memory("g4debug-shallow"), device="cuda")
    arguments = dict(cuda(RUNNING, models).engine)
    for name in ("disable_radix_cache", "swa_full_tokens_ratio"):
        arguments.pop(name)
    return arguments | {"max_total_tokens": 8192, "cuda_graph_bs": [1, 4, RUNNING]}


def main(device: str, result: str, alone: int, many: int, answer: int) -> None:
    if device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    from harness import mixed
    from harness.engine import greedy, running
    from harness.tracers import shown

    requests = mixed.requests(alone + many, 5, LONGEST[device], (2, answer))
    prompts = [list(r.prompt) for r in requests]
    sampling = [greedy(r.output) for r in requests]
    rids = [r.rid for r in requests]
    with running(engine(device)) as served:
        outputs = [
            served.generate(input_ids=prompt, sampling_params=how, rid=rid)
            for prompt, how, rid in zip(prompts[:alone], sampling, rids, strict=False)
        ]
        outputs += served.generate(
            input_ids=prompts[alone:], sampling_params=sampling[alone:], rid=rids[alone:]
        )
        time.sleep(0.5)  # at idle, SGLang and pool-leak count their pages
        tracers = [of for scheduler in shown().values() for of in scheduler["tracers"]]
        found = {
            "tokens": [o["output_ids"] for o in outputs],
            "wanted": [r.output for r in requests],
            "aborted": [
                (o["meta_info"].get("finish_reason") or {}).get("type") == "abort" for o in outputs
            ],
            "tracers": tracers if os.environ.get("G4DEBUG_TRACE") else [],
        }
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":  # spawned grandchildren import this module, too
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
