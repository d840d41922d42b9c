"""Answers [lengths of the prompts, tokens to make, seed, together?] with seconds and tokens.

All prompts are sent in one call, or one after the other. With a fifth part, a folder, SGLang's
profiler looks at host and GPU meanwhile and writes its trace there.
"""

from __future__ import annotations

import random
import time
from typing import Any

from harness.engine import greedy

from served.profiled import profiled


def answer(engine: Any, device: str, question: Any) -> dict[str, Any]:
    lengths, tokens, seed, together, *profile = question
    rng = random.Random(seed)
    prompts = [[2, *(rng.randrange(4, 500) for _ in range(n - 1))] for n in lengths]
    calls = [prompts] if together else [[prompt] for prompt in prompts]
    with profiled(engine, device, profile, host=True):
        begin = time.perf_counter()
        outputs = [
            o for c in calls for o in engine.generate(input_ids=c, sampling_params=greedy(tokens))
        ]
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": [o["output_ids"] for o in outputs]}
