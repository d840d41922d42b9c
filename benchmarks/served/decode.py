"""Answers [batch, tokens] with the seconds and the accept length of so many alike requests.

With a third part, a folder, SGLang's profiler runs meanwhile and writes its trace there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from harness.engine import greedy

from served.profiled import profiled

PROMPT = {"cuda": 500, "cpu": 100}  # tokens


def arguments(device: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The demo's, without the prefix cache, and with pools for 64 requests."""
    from workloads.e4b_trtllm_mtp import DEVICES, cuda

    if device == "cuda" and "model_path" in given:  # writes no model
        made = dict(cuda(None, (given["model_path"], None)).engine)
    else:
        made = dict(DEVICES[device](None).engine)
    made |= {"log_level": "error", "disable_radix_cache": True}
    made.pop("swa_full_tokens_ratio", None)
    if device == "cuda":
        made |= {
            "max_running_requests": 64,
            "cuda_graph_max_bs": 64,
            "max_total_tokens": 64 * 1600,
            "chunked_prefill_size": 8192,
        }
    return {**made, **given}


def prompts(count: int, length: int) -> list[list[int]]:
    """The same ones each time."""
    rng = random.Random(0)
    return [[2, *(rng.randrange(4, 500) for _ in range(length - 1))] for _ in range(count)]


def answer(engine: Any, device: str, question: Any) -> dict[str, Any]:
    batch, tokens, *profile = question
    asked = prompts(batch, PROMPT[device])
    with profiled(engine, device, profile):
        begin = time.perf_counter()
        outputs = engine.generate(input_ids=asked, sampling_params=greedy(tokens))
        seconds = time.perf_counter() - begin
    accepted = [o["meta_info"].get("spec_accept_length", 1.0) for o in outputs]
    return {"seconds": seconds, "accept_length": sum(accepted) / len(accepted)}
