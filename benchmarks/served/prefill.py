"""Answers [lengths of the prompts, tokens to make, seed, together?] with seconds and tokens.

All prompts are sent in one call, or one after the other.
"""

from __future__ import annotations

import random
import time
from typing import Any

from harness.engine import greedy


def answer(engine: Any, device: str, question: Any) -> dict[str, Any]:
    lengths, tokens, seed, together = question
    rng = random.Random(seed)
    prompts = [[2, *(rng.randrange(4, 500) for _ in range(n - 1))] for n in lengths]
    begin = time.perf_counter()
    calls = [prompts] if together else [[prompt] for prompt in prompts]
    outputs = [
        o for c in calls for o in engine.generate(input_ids=c, sampling_params=greedy(tokens))
    ]
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": [o["output_ids"] for o in outputs]}
