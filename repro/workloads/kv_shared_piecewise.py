"""The workload of kv_shared_piecewise: E2B's geometry, 20 of 35 layers KV-shared, no MTP."""

from __future__ import annotations

from typing import Any

from harness.workload import Workload, each, in_memory

# Default arguments. Triton is named because SGLang would choose it for the real E2B, too.
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "context_length": 8192,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "disable_radix_cache": True,
    "random_seed": 0,
    "log_level": "info",
}


def cuda(requests: int | None) -> Workload:
    from g4debug.cpu.models import E2B, write

    target, _ = write(E2B, in_memory("g4debug-e2b"), device="cuda")
    own = {"model_path": str(target), "mem_fraction_static": 0.6, "decode_log_interval": 1}
    return Workload(requests or 8, (300, 900), 32, E2B.vocab, ENGINE | own, timeout=400)


DEVICES = {"cuda": cuda}
EAGER = each(DEVICES, disable_piecewise_cuda_graph=True)
