"""The workloads of mm_piecewise_parity: three geometries, each eager and in piecewise graphs."""

from __future__ import annotations

from dataclasses import replace

from harness.workload import Make, Workload, each, in_memory

from workloads import multimodal
from workloads.kv_shared_piecewise import ENGINE

REQUESTS = 20


def _of(name: str, ple: bool = False, kv_shared: bool = False) -> dict[str, Make]:
    """E4B's layers, fewer of them, and a small vocabulary. ple: with per-layer inputs."""

    def cuda(requests: int | None) -> Workload:
        from g4debug.cpu.geometry import E4B_256

        geometry = replace(
            E4B_256,
            vocab=16_384,
            pattern="sssssf" * 3,
            kv_shared=6,
            ple=256 if ple else 0,
            centroids=256,
        )
        folder = in_memory(f"g4debug-mm-{name}")
        model = folder / "mm"
        if not (model / "model.safetensors.index.json").is_file():
            model = multimodal.write(geometry, kv_shared, folder, "cuda")
        engine = ENGINE | {"model_path": str(model), "mem_fraction_static": 0.5}
        count = requests or REQUESTS
        return Workload(count, (200, 900), 32, geometry.vocab, engine, timeout=300)

    return {"cuda": cuda}


DENSE = _of("dense")
KV_SHARED = _of("kv-shared", kv_shared=True)
PER_LAYER_INPUTS = _of("per-layer-inputs", ple=True, kv_shared=True)
# SGLang's own flag for tests. It skips every reason to switch the graphs off, also ours.
PER_LAYER_INPUTS_ENFORCED = each(PER_LAYER_INPUTS, enforce_piecewise_cuda_graph=True)
