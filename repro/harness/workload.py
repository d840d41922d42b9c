"""The work for an engine: arguments, prompts drawn from a seed, lengths of the answers."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class Workload:
    """requests: how many; prompt: shortest and longest prompt in tokens; output: tokens, of every
    answer or of each. in_turns: ``harness.standing`` sends a request when the one before is served.
    """

    requests: int
    prompt: tuple[int, int]
    output: int | list[int]
    vocab: int
    engine: Mapping[str, Any]
    timeout: float  # seconds that one variant may take, start-up included
    in_turns: ClassVar[bool] = False

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Token ids; the same for the same seed."""
        rng = random.Random(seed)
        low, high = self.prompt
        lengths = [low if low == high else rng.randint(low, high) for _ in range(self.requests)]
        return [[2, *(rng.randrange(4, self.vocab) for _ in range(n - 1))] for n in lengths]

    @classmethod
    def toy(
        cls, requests: int, prompt: tuple[int, int], output: int | list[int], **engine: Any
    ) -> Self:
        """A workload for the toy model on the CPU engine. engine: more of its arguments."""
        from g4debug.cpu.geometry import TINY
        from g4debug.cpu.server import engine_arguments

        arguments = engine_arguments(log_level="info", skip_tokenizer_init=True, **engine)
        return cls(requests, prompt, output, TINY.vocab, arguments, timeout=300)

    def given(self, **arguments: Any) -> Workload:
        """The same with these arguments of the engine."""
        return replace(self, engine={**self.engine, **arguments})

    def without_mtp(self) -> Workload:
        kept = {n: v for n, v in self.engine.items() if not n.startswith("speculative_")}
        return replace(self, engine=kept)


# Arguments that the engines of all workloads on a GPU have in common.
GPU_ENGINE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "random_seed": 0,
    "log_level": "info",
}
Make = Callable[[int | None], Workload]  # takes the number of requests, None for the usual one


def each(devices: Mapping[str, Make], **arguments: Any) -> dict[str, Make]:
    """The workloads of ``devices`` with these arguments of the engine."""
    return _changed(devices, lambda workload: workload.given(**arguments))


def undrafted(devices: Mapping[str, Make]) -> dict[str, Make]:
    """The workloads of ``devices`` without their draft."""
    return _changed(devices, Workload.without_mtp)


def _changed(
    devices: Mapping[str, Make], change: Callable[[Workload], Workload]
) -> dict[str, Make]:
    def of(make: Make) -> Make:
        return lambda requests: change(make(requests))

    return {device: of(make) for device, make in devices.items()}


def without_mtp() -> dict[str, None]:
    """Arguments of ``sgl.Engine`` that take MTP out of a workload."""
    from g4debug.cpu.server import MTP

    return dict.fromkeys(("speculative_draft_model_path", *MTP))


def in_memory(name: str) -> Path:
    """A folder for gigabytes of weights: in memory, where there is such a file system."""
    memory = Path("/dev/shm")
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / name
