"""The workload of hybrid_pool_swap: prefill on triton, decode on trtllm_mha; MTP on and off."""

from __future__ import annotations

from dataclasses import replace

from harness.workload import Workload

from workloads import e4b_trtllm_mtp


def cpu(requests: int | None) -> Workload:
    """Few tokens, because Triton is interpreted. Verify runs on the decode backend, to avoid it."""
    from g4debug.cpu.server import engine_arguments

    arguments = engine_arguments(
        log_level="info",
        skip_tokenizer_init=True,
        attention_backend=None,
        prefill_attention_backend="triton",
        decode_attention_backend="trtllm_mha",
        speculative_attention_mode="decode",
    )
    small = e4b_trtllm_mtp.cpu(requests or 3)
    return replace(small, prompt=(150, 250), output=30, engine=arguments, timeout=300)


def cuda(requests: int | None) -> Workload:
    """The demo's. The draft's first forward is the capture of its CUDA graphs, at start."""
    return e4b_trtllm_mtp.cuda(requests or 8)


def without_mtp(workload: Workload) -> Workload:
    kept = {n: v for n, v in workload.engine.items() if not n.startswith("speculative_")}
    return replace(workload, engine=kept)


DEVICES = {"cpu": cpu, "cuda": cuda}
PLAIN = {name: (lambda n, make=make: without_mtp(make(n))) for name, make in DEVICES.items()}
