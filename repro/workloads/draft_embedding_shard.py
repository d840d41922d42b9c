"""The workload of draft_embedding_shard: MTP of a text-only Gemma-4, on one rank or on two."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _workload
from _workload import Workload

# In a process that ends before the engine starts: one that has used GPU 0 keeps memory there, and
# SGLang refuses tensor parallelism over GPUs that do not have the same amount of free memory.
WRITE = (
    "import sys; from g4debug.cpu.models import E4B_256, write; "
    "write(E4B_256, sys.argv[1], device='cuda')"
)


def cpu(requests: int | None, **given: Any) -> Workload:
    from g4debug.cpu.server import engine_arguments

    engine = engine_arguments(log_level="info", skip_tokenizer_init=True, **given)
    small = _workload.cpu(requests or 6)
    return replace(small, prompt=(60, 300), output=40, engine=engine)


@dataclass(frozen=True)
class First(Workload):
    """The first request only. Two ranks that draft different tokens also finish their requests at
    different times, and of a batch they then wait for each other with other sizes."""

    def prompts(self, seed: int = 0) -> list[list[int]]:
        return super().prompts(seed)[:1]


def low(requests: int | None) -> Workload:
    """No token of the upper half of the vocabulary is ever looked up."""
    import _half_vocabulary

    folder = Path(tempfile.gettempdir()) / "g4debug-half-vocabulary"
    target, assistant = _half_vocabulary.write(folder)
    models = {"model_path": str(target), "speculative_draft_model_path": str(assistant)}
    all_of_them = cpu(requests, tp_size=2, **models)
    return First(**vars(all_of_them))


def write_models() -> Path:
    """The folder with ``target`` and ``assistant``, which are written if they are not there."""
    folder = _workload.in_memory("g4debug-e4b256")
    subprocess.run([sys.executable, "-c", WRITE, str(folder)], check=True)
    return folder


def cuda(requests: int | None, **given: Any) -> Workload:
    """As in _workload, with shorter prompts and pools that hold them all."""
    folder = write_models()
    large = _workload.cuda(requests or 16, (folder / "target", folder / "assistant"))
    engine = {**large.engine, "swa_full_tokens_ratio": 0.8, **given}
    return replace(large, prompt=(200, 600), engine=engine, timeout=500)


def too_few_gpus() -> str:
    """What to say on a machine with one GPU; '' on one with two, or with none."""
    import torch

    if torch.cuda.device_count() != 1:
        return ""
    return (
        "This script needs two GPUs, or none, and this machine has one. This command hides it:\n"
        "    CUDA_VISIBLE_DEVICES='' python repro/draft_embedding_shard.py"
    )


def _ranks(count: int) -> dict[str, Callable[[int | None], Workload]]:
    return {
        "cpu": lambda requests: cpu(requests, tp_size=count),
        "cuda": lambda requests: cuda(requests, tp_size=count),
    }


DEVICES = _ranks(2)
ALONE = _ranks(1)
LOW = {"cpu": low}
