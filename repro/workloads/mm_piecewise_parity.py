"""The workloads of mm_piecewise_parity: three geometries, each eager and in piecewise graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import _mm_model
from _workload import Workload, in_memory

# name -> (per-layer inputs?, KV-shared layers?)
GEOMETRIES = {"dense": (False, False), "kv-shared": (False, True), "per-layer-inputs": (True, True)}
REQUESTS = 20


def _geometry(ple: bool) -> Any:
    """E4B's layers, fewer of them, and a small vocabulary."""
    from g4debug.cpu.geometry import E4B_256

    return replace(
        E4B_256,
        vocab=16_384,
        pattern="sssssf" * 3,
        kv_shared=6,
        ple=256 if ple else 0,
        centroids=256,
    )


def _workload(name: str, **arguments: Any) -> Callable[[int | None], Workload]:
    def cuda(requests: int | None) -> Workload:
        ple, kv_shared = GEOMETRIES[name]
        geometry = _geometry(ple)
        folder = in_memory(f"g4debug-mm-{name}")
        model = folder / "mm"
        if not (model / "model.safetensors.index.json").is_file():
            model = _mm_model.write(geometry, kv_shared, folder, "cuda")
        engine = {
            "model_path": str(model),
            "dtype": "bfloat16",
            "attention_backend": "triton",
            "mem_fraction_static": 0.5,
            "context_length": 8192,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "disable_radix_cache": True,
            "random_seed": 0,
            "log_level": "info",
            **arguments,
        }
        count = requests or REQUESTS
        return Workload(count, (200, 900), 32, geometry.vocab, engine, timeout=300)

    return cuda


DENSE = {"cuda": _workload("dense")}
KV_SHARED = {"cuda": _workload("kv-shared")}
PER_LAYER_INPUTS = {"cuda": _workload("per-layer-inputs")}
# SGLang's own flag for tests. It skips every reason to switch the graphs off, also ours.
PER_LAYER_INPUTS_ENFORCED = {
    "cuda": _workload("per-layer-inputs", enforce_piecewise_cuda_graph=True)
}
