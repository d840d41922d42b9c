"""The workload of draft_embedding_shard: MTP of a text-only Gemma-4, on one rank or on two."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from harness.workload import Workload, each, in_memory

from workloads import e4b_trtllm_mtp, half_vocabulary

# In a process that ends before the engine starts: one that has used GPU 0 keeps memory there, and
# SGLang refuses tensor parallelism over GPUs that do not have the same amount of free memory.
WRITE = (
    "import sys; from g4debug.cpu.models import E4B_256, write; "
    "write(E4B_256, sys.argv[1], device='cuda')"
)


def cpu(requests: int | None) -> Workload:
    return Workload.toy(requests or 6, (60, 300), 40)


class First(Workload):
    """The first request only. Two ranks that draft different tokens also finish their requests at
    different times, and of a batch they then wait for each other with other sizes."""

    def prompts(self, seed: int = 0) -> list[list[int]]:
        return super().prompts(seed)[:1]


def low(requests: int | None) -> Workload:
    """No token of the upper half of the vocabulary is ever looked up."""
    folder = Path(tempfile.gettempdir()) / "g4debug-half-vocabulary"
    target, assistant = half_vocabulary.write(folder)
    models = {"model_path": str(target), "speculative_draft_model_path": str(assistant)}
    return First(**vars(cpu(requests).given(tp_size=2, **models)))


def write_models() -> Path:
    """The folder with ``target`` and ``assistant``, which are written if they are not there."""
    folder = in_memory("g4debug-e4b256")
    subprocess.run([sys.executable, "-c", WRITE, str(folder)], check=True)
    return folder


def cuda(requests: int | None) -> Workload:
    """The demo's, with shorter prompts and pools that hold them all."""
    folder = write_models()
    large = e4b_trtllm_mtp.cuda(requests or 16, (folder / "target", folder / "assistant"))
    return replace(large, prompt=(200, 600), timeout=500).given(swa_full_tokens_ratio=0.8)


def too_few_gpus() -> str:
    """The message for a machine with one GPU; '' for another."""
    import torch

    if torch.cuda.device_count() != 1:
        return ""
    return (
        "This script needs two GPUs, or none, and this machine has one. This command hides it:\n"
        "    CUDA_VISIBLE_DEVICES='' python repro/draft_embedding_shard.py"
    )


ON = {"cpu": cpu, "cuda": cuda}
DEVICES = each(ON, tp_size=2)
ALONE = each(ON, tp_size=1)
LOW = {"cpu": low}
