"""A child: one engine, and a fork of its scheduler for each corruption."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import engine
from harness.engine import greedy

from suites.fuzz import forks

REQUESTS = 6
# The servers on which corruptions are drawn: name -> (with FROZEN_KV_MTP, arguments of the engine).
# The pools are small, so that SWA pages are evicted and cached ones are used again.
SERVERS: Mapping[str, tuple[bool, Mapping[str, Any]]] = {
    "mtp": (True, {"page_size": 64, "attention_backend": "trtllm_mha"}),
    "overlap": (False, {"page_size": 16, "attention_backend": "triton"}),
    "mtp-triton": (True, {"page_size": 16, "attention_backend": "triton"}),
    "plain": (
        False,
        {"page_size": 64, "attention_backend": "trtllm_mha", "disable_overlap_schedule": True},
    ),
}
COMMON = {
    "max_total_tokens": 4096,
    "swa_full_tokens_ratio": 0.5,
    "chunked_prefill_size": 128,
    "max_running_requests": 4,
}
PATIENCE = 60.0  # seconds more than the forks may take together


def prompts() -> list[list[int]]:
    """Some begin alike, so that the prefix cache has something to hand out."""
    dice = random.Random("corrupt")
    words = [[dice.randint(4, 511) for _ in range(300)] for _ in range(3)]
    lengths = (90, 150, 200, 170, 230, 120)
    return [[2, *words[n % 3][:length]] for n, length in enumerate(lengths)][:REQUESTS]


def main(device: str, result: Path, server: str, seeds: list[int]) -> None:
    mtp, arguments = SERVERS[server]
    folder = result.parent
    for name in (forks.GO, forks.DONE):
        (folder / name).unlink(missing_ok=True)
    order = {"folder": str(folder), "seeds": seeds, "mtp": mtp}
    os.environ[forks.VARIABLE] = json.dumps(order)
    from sglang.srt.entrypoints.engine import Engine as SGLangEngine

    from g4debug.cpu.server import engine_arguments

    class Engine(SGLangEngine):  # type: ignore[misc]  # SGLang has no types
        run_scheduler_process_func = staticmethod(forks.run_scheduler_process)

    made = engine_arguments(mtp=mtp, **COMMON, **arguments)
    with engine.running(made, Engine) as it:
        lengths = [24, 40, 16, 32, 48, 20][:REQUESTS]
        # One after the other: what the pools look like then is the same in each run.
        for prompt, length in zip(prompts(), lengths, strict=True):
            it.generate(input_ids=prompt, sampling_params=greedy(length))
        engine.flush(it)
        (folder / forks.GO).touch()
        end = time.monotonic() + PATIENCE + forks.SECONDS * (len(seeds) + 2)
        while not (folder / forks.DONE).exists() and time.monotonic() < end:
            time.sleep(0.2)
    done = (folder / forks.DONE).exists()
    result.write_text(json.dumps({"done": done, "seeds": seeds}))
