"""The workload of zero_accept_merge: each request fills the pool, and the next one waits for it.

A pool that holds one request at a time makes every end of a request a *hand-over*: the batch
of one drains in a verify while the next request waits, and its prefill is merged into it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Workload:
    """requests: one more than hand-overs; prompt and output in tokens."""

    requests: int
    prompt: int
    output: int
    vocab: int
    engine: dict[str, Any]
    limit: float  # seconds that one arm may take, start-up included

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Token ids; the same for the same seed."""
        rng = random.Random(seed)
        return [
            [2, *(rng.randrange(4, self.vocab) for _ in range(self.prompt - 1))]
            for _ in range(self.requests)
        ]


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.server import engine_arguments

    count = requests or 201
    arguments = engine_arguments(
        log_level="info",
        decode_log_interval=1,
        skip_tokenizer_init=True,
        max_total_tokens=512,  # one request of 300 + 8 tokens, not two
        max_running_requests=8,
        chunked_prefill_size=512,
        disable_radix_cache=True,
    )
    return Workload(count, 300, 8, TINY.vocab, arguments, limit=300)


def cuda(requests: int | None) -> Workload:
    """The E4B geometry of the other repro, with pools that hold one request at a time."""
    import _workload

    other = _workload.cuda(8)
    arguments = {
        **other.engine,
        "max_total_tokens": 64 * 40,
        "swa_full_tokens_ratio": 0.8,
        "chunked_prefill_size": 2048,
    }
    count = requests or 201
    return Workload(count, 1500, 8, other.vocab, arguments, limit=400)


def _alone(device: Callable[[int | None], Workload]) -> Callable[[int | None], Workload]:
    def alone(requests: int | None) -> Workload:
        workload = device(requests)
        return replace(workload, engine={**workload.engine, "max_running_requests": 1})

    return alone


DEVICES = {"cpu": cpu, "cuda": cuda}
# With one seat, SGLang admits nobody before it has filtered the drained batch. (To send each
# request after the end of the one before is not enough: it may arrive before the filter.)
ALONE = {name: _alone(device) for name, device in DEVICES.items()}
