"""The demo's workload: Gemma-4 E4B with trtllm_mha and MTP, as large as the device allows.

Seed PRs #3 to #6 sent 80 prompts of 8,000 tokens, 1,000 tokens out, to a B200. These are fewer and
smaller: long prompts, short answers, and so many at once that the SWA pool gets over 85 % full.
"""

from __future__ import annotations

from pathlib import Path

from harness.workload import GPU_ENGINE, Workload, each, in_memory, undrafted


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    from harness.arguments import keeps_whole_prompts

    return Workload.toy(
        requests or 10,
        (500, 700),
        40,
        decode_log_interval=1,
        max_total_tokens=5120,
        swa_full_tokens_ratio=0.65 if keeps_whole_prompts() else 0.43,
        max_running_requests=requests or 10,
        chunked_prefill_size=512,
    )


def cuda(requests: int | None, models: tuple[Path, Path | None] | None = None) -> Workload:
    """The E4B geometry (full layers' head_dim 256 for sm90) with seeded weights; or ``models``,
    a target and a draft.

    The pools are sized so that a stale page is *fatal*. Measured on a H200 (driver 580):
    cudaMalloc puts large blocks 32 MiB apart, so a layer's K buffer of 373 pages x 64 KiB
    is followed by 8 MiB of nothing (pages 384 to 511). With a buffer of 481 pages, which
    fills its 32 MiB, the same bug reads a neighbour's memory and nobody notices. With the
    torch of SGLang 0.5.23 there are no such holes (``harness.arguments.blocks_are_adjacent``).
    """
    from harness.arguments import mtp_has_overlap

    from g4debug.cpu.models import E4B_256, write
    from g4debug.cpu.server import MTP

    target, assistant = models or write(E4B_256, in_memory("g4debug-e4b256"), device="cuda")
    count = requests or 32
    arguments = {
        "model_path": str(target),
        "speculative_draft_model_path": str(assistant),
        **MTP,
        **GPU_ENGINE,
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
        "decode_log_interval": 1,
    }
    return Workload(count, (1800, 2200), 100, E4B_256.vocab, arguments, timeout=400)


DEVICES = {"cpu": cpu, "cuda": cuda}
ON_A_GPU = {"cuda": cuda}
# With the prompts on trtllm_mha, too: since 0.5.23 sm90 has a kernel for them.
ONE_BACKEND = each(ON_A_GPU, prefill_attention_backend="trtllm_mha")
# With everything on triton, SGLang's default for Gemma-4 on most chips.
TRITON = each(ON_A_GPU, decode_attention_backend="triton")
NO_MTP, TRITON_NO_MTP = undrafted(ON_A_GPU), undrafted(TRITON)
ONE_BACKEND_NO_MTP = undrafted(ONE_BACKEND)
EAGER = each(ON_A_GPU, disable_cuda_graph=True)
# With pools as large as a server takes them that has the GPU for itself.
FULL = each(ON_A_GPU, max_total_tokens=None, mem_fraction_static=0.9)
