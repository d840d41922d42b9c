"""The workload of the matrix and the soak: short and long requests, small pools.

Several requests share a prefix. Their outputs differ in length, so that batches shrink and grow.
The pools are so small that requests wait and are retracted, and sequences outgrow the window.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

# For thousands of short requests: more arguments of :func:`requests`, by device.
SHORT: dict[str, dict[str, Any]] = {
    "cpu": {"longest": 160, "output": [2, 14]},
    "cuda": {"longest": 900, "output": [2, 60]},
}


@dataclass(frozen=True)
class Request:
    rid: str
    prompt: tuple[int, ...]
    output: int  # tokens to generate


def requests(
    count: int, seed: int, longest: int = 330, output: tuple[int, int] = (3, 40)
) -> list[Request]:
    """``count`` requests, the same for the same seed; token ids of the toy model."""
    from g4debug.cpu.geometry import TINY

    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(4, TINY.vocab) for _ in range(n)]

    prefixes = [[2, *tokens(longest * 2 // 3)] for _ in range(3)]
    found = []
    for number in range(count):
        if rng.random() < 0.5:
            prefix = rng.choice(prefixes)
            prompt = prefix[: rng.randrange(2, len(prefix))] + tokens(
                rng.randrange(1, longest // 3)
            )
        else:
            prompt = [2, *tokens(rng.randrange(1, longest))]
        found.append(Request(f"r{seed}-{number}", tuple(prompt), rng.randint(*output)))
    return found


def on_gpu(**overrides: Any) -> dict[str, Any]:
    """The same on a GPU: E4B's geometry, split backends, CUDA graphs, the prefix cache on."""
    from _arguments import as_named_here
    from _workload import cuda

    arguments = dict(cuda(int(overrides.get("max_running_requests", 12))).engine)
    for name in ("disable_radix_cache", "swa_full_tokens_ratio"):
        arguments.pop(name)
    return as_named_here(arguments | {"max_total_tokens": 4096, **overrides})


def engine(**overrides: Any) -> dict[str, Any]:
    """Arguments of ``sgl.Engine``: pools that a full batch of long requests does not fit into."""
    from g4debug.cpu.server import engine_arguments

    return engine_arguments(
        **{
            "log_level": "info",
            "decode_log_interval": 1,
            "skip_tokenizer_init": True,
            "max_total_tokens": 2048,
            "max_running_requests": 6,
            "chunked_prefill_size": 256,
            **overrides,
        }
    )
