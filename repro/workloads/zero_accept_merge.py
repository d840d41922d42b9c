"""The workload of zero_accept_merge: each request fills the pool, and the next one waits for it.

The pool holds one request at a time. So every end of a request is a *hand-over*: the batch, which
holds only this request, runs empty in a verify while the next request waits, and then that request
is prefilled and merged into the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Workload:
    """requests: how many, one more than there are hand-overs. prompt and output: in tokens."""

    requests: int
    prompt: int
    output: int
    vocab: int
    engine: dict[str, Any]
    timeout: float  # seconds that one variant may take, start-up included

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
    return Workload(count, 300, 8, TINY.vocab, arguments, timeout=300)


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
    return Workload(count, 1500, 8, other.vocab, arguments, timeout=400)


def _alone(device: Callable[[int | None], Workload]) -> Callable[[int | None], Workload]:
    def alone(requests: int | None) -> Workload:
        workload = device(requests)
        return replace(workload, engine={**workload.engine, "max_running_requests": 1})

    return alone


DEVICES = {"cpu": cpu, "cuda": cuda}
# If only one request may run, SGLang admits the next one after it has filtered the empty batch.
# (To send each request after the end of the one before is not enough: it may come too early.)
ALONE = {name: _alone(device) for name, device in DEVICES.items()}
