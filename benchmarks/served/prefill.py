"""Answers [lengths of the prompts, tokens to make, seed, together?] with seconds and tokens.

All prompts are sent in one call, or one after the other. With a fifth part, a folder, SGLang's
profiler looks at host and GPU meanwhile and writes its trace there.
"""

from __future__ import annotations

import random
import time
from typing import Any

from harness.engine import greedy


def answer(engine: Any, device: str, question: Any) -> dict[str, Any]:
    lengths, tokens, seed, together, *profile = question
    rng = random.Random(seed)
    prompts = [[2, *(rng.randrange(4, 500) for _ in range(n - 1))] for n in lengths]
    if profile:
        activities = ["CPU", "GPU"] if device == "cuda" else ["CPU"]
        engine.start_profile(output_dir=profile[0], activities=activities, with_stack=False)
    begin = time.perf_counter()
    calls = [prompts] if together else [[prompt] for prompt in prompts]
    outputs = [
        o for c in calls for o in engine.generate(input_ids=c, sampling_params=greedy(tokens))
    ]
    seconds = time.perf_counter() - begin
    if profile:
        engine.stop_profile()
    return {"seconds": seconds, "tokens": [o["output_ids"] for o in outputs]}
