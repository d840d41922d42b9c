"""The demo's workload: Gemma-4 E4B with trtllm_mha and MTP, as large as the device allows.

It is that of seed PRs #3 to #6 (80 prompts of 8,000 tokens, 1,000 tokens out, on a B200), made
smaller: long prompts, short answers, and so many at once that the SWA pool gets over 85 % full.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


def without_mtp() -> dict[str, None]:
    """Arguments of ``sgl.Engine`` that take MTP out of those of a workload."""
    from g4debug.cpu.server import MTP

    return dict.fromkeys(("speculative_draft_model_path", *MTP))


@dataclass(frozen=True)
class Workload:
    """requests: how many; prompt: shortest and longest prompt in tokens; output: tokens."""

    requests: int
    prompt: tuple[int, int]
    output: int
    vocab: int
    engine: dict[str, Any]
    timeout: float  # seconds that one variant may take, start-up included

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Token ids; the same for the same seed."""
        rng = random.Random(seed)
        lengths = [rng.randint(*self.prompt) for _ in range(self.requests)]
        return [[2, *(rng.randrange(4, self.vocab) for _ in range(n - 1))] for n in lengths]


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    from _arguments import keeps_whole_prompts

    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.server import engine_arguments

    arguments = engine_arguments(
        log_level="info",
        decode_log_interval=1,
        skip_tokenizer_init=True,
        max_total_tokens=5120,
        swa_full_tokens_ratio=0.65 if keeps_whole_prompts() else 0.43,
        max_running_requests=requests or 10,
        chunked_prefill_size=512,
    )
    return Workload(requests or 10, (500, 700), 40, TINY.vocab, arguments, timeout=300)


def in_memory(name: str) -> Path:
    """A folder for gigabytes of weights: in memory, where there is such a file system."""
    memory = Path("/dev/shm")
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / name


def cuda(requests: int | None, models: tuple[Any, Any] | None = None) -> Workload:
    """The E4B geometry (full layers' head_dim 256 for sm90) with seeded weights; or ``models``,
    a target and a draft.

    The pools are sized so that a stale page is *fatal*. Measured on a H200 (driver 580):
    cudaMalloc puts large blocks 32 MiB apart, so a layer's K buffer of 373 pages x 64 KiB
    is followed by 8 MiB of nothing (pages 384 to 511). With a buffer of 481 pages, which
    fills its 32 MiB, the same bug reads a neighbour's memory and nobody notices. With the
    torch of SGLang 0.5.23 there are no such holes (:func:`_arguments.blocks_are_adjacent`).
    """
    from _arguments import mtp_has_overlap

    from g4debug.cpu.models import E4B_256, write
    from g4debug.cpu.server import MTP

    target, assistant = models or write(E4B_256, in_memory("g4debug-e4b256"), device="cuda")
    count = requests or 32
    arguments = {
        "model_path": str(target),
        "speculative_draft_model_path": str(assistant),
        **MTP,
        "dtype": "bfloat16",
        # sm90 has no trtllm prefill; verify then runs on the prefill backend (SGLang's default).
        "prefill_attention_backend": "triton",
        "decode_attention_backend": "trtllm_mha",
        "page_size": 64,
        "disable_overlap_schedule": not mtp_has_overlap(),
        # A model with KV-shared layers does not start under piecewise CUDA graphs (seed PR #16).
        "disable_piecewise_cuda_graph": True,
        "cuda_graph_max_bs": count,
        "max_running_requests": count,
        "mem_fraction_static": 0.6,
        "max_total_tokens": 64 * 1200,
        "swa_full_tokens_ratio": 0.31,
        # Without the radix cache SGLang frees SWA pages behind the window at each chunk, so
        # that the full pool fills beyond the size of the SWA pool.
        "disable_radix_cache": True,
        "chunked_prefill_size": 1024,
        "context_length": 16384,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "random_seed": 0,
        "log_level": "info",
        "decode_log_interval": 1,
    }
    return Workload(count, (1800, 2200), 100, E4B_256.vocab, arguments, timeout=400)


def cuda_one_backend(requests: int | None) -> Workload:
    """The same with the prompts on trtllm_mha, too: since 0.5.23 sm90 has a kernel for them."""
    workload = cuda(requests)
    return replace(workload, engine=workload.engine | {"prefill_attention_backend": "trtllm_mha"})


def cuda_triton(requests: int | None) -> Workload:
    """The same with everything on triton, SGLang's default for Gemma-4 on most chips."""
    workload = cuda(requests)
    return replace(workload, engine=workload.engine | {"decode_attention_backend": "triton"})


DEVICES = {"cpu": cpu, "cuda": cuda}
ONE_BACKEND = {"cuda": cuda_one_backend}
TRITON = {"cuda": cuda_triton}
