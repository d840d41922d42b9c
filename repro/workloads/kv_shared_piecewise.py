"""The workload of kv_shared_piecewise: E2B's geometry, 20 of 35 layers KV-shared, no MTP."""

from __future__ import annotations

from dataclasses import replace

from _workload import Workload, in_memory


def cuda(requests: int | None) -> Workload:
    """Default arguments. Triton is named because SGLang would choose it for the real E2B, too."""
    from g4debug.cpu.models import E2B, write

    target, _ = write(E2B, in_memory("g4debug-e2b"), device="cuda")
    arguments = {
        "model_path": str(target),
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "mem_fraction_static": 0.6,
        "context_length": 8192,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "disable_radix_cache": True,
        "random_seed": 0,
        "log_level": "info",
        "decode_log_interval": 1,
    }
    return Workload(requests or 8, (300, 900), 32, E2B.vocab, arguments, timeout=400)


def eager_cuda(requests: int | None) -> Workload:
    workload = cuda(requests)
    return replace(workload, engine={**workload.engine, "disable_piecewise_cuda_graph": True})


DEVICES = {"cuda": cuda}
EAGER = {"cuda": eager_cuda}
