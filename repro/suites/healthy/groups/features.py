"""Features that only some servers switch on: LoRA, the hierarchical cache, other prefix caches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4debug.hooking import targets
from suites.healthy.groups.endings import shared_prefix
from suites.healthy.groups.shapes import batches, reused
from suites.healthy.workload import Client, finish, require, with_mtp, without_mtp, workload

RANK = 4


def adapters(folder: Path, model: str) -> Mapping[str, Any]:
    """Write two LoRA adapters for Gemma-4's attention, of random numbers."""
    import torch
    from safetensors.torch import save_file

    from g4debug.cpu.geometry import TINY

    paths = []
    for number in range(2):
        target = folder / f"adapter-{number}"
        target.mkdir(exist_ok=True)
        random = torch.Generator().manual_seed(number)
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(TINY.layers):
            dim = TINY.dim(layer)
            for name, rows in (("q", TINY.heads), ("k", TINY.kv_heads), ("v", TINY.kv_heads)):
                where = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
                down = torch.randn(RANK, TINY.hidden, generator=random)
                up = torch.randn(rows * dim, RANK, generator=random)
                tensors |= {f"{where}.lora_A.weight": down, f"{where}.lora_B.weight": up}
        save_file(tensors, target / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "v_proj"],
        }
        (target / "adapter_config.json").write_text(json.dumps(config))
        paths.append(f"a{number}={target}")
    return {"enable_lora": True, "lora_paths": paths, "lora_backend": "torch_native"}


@workload("LoRA", "two adapters and none, at the same time")
async def lora(client: Client) -> None:
    prompt = client.prompt(150)
    names = (None, "a0", "a1")
    found = await client.together(
        *(client.generate(prompt, 20, lora_path=n) for n in names),
        *(client.generate(client.prompt(90), 30, lora_path=n) for n in names),
    )
    require(all(finish(o) == "length" for o in found), "a request did not complete")
    client.note("answers with adapters", 4)
    client.note(
        "different answers to the same prompt",
        len({tuple(o["output_ids"]) for o in found[:3]}),
        2,
    )


HICACHE = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "max_total_tokens": 2048}
UNIFIED = {"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"}

# From 0.5.13 on HiCache of such a model is the unified cache's, see "hicache-unified".
BEFORE_UNIFIED = (
    without_mtp(
        "hicache",
        "HiCache: SGLang's HiRadixCache takes no model with a SWA pool",
        (shared_prefix,),
        HICACHE,
        refused="ValueError: HiRadixCache only supports MHA, MLA, and NSA (DSA) models",
    ),
)

GROUPS = (
    *(BEFORE_UNIFIED if targets.matches("<0.5.13") else ()),
    without_mtp(
        "lora",
        "LoRA: SGLang's layers for it want pinned memory, which only an accelerator has",
        (lora,),
        prepare=adapters,
        refused="RuntimeError: pin_memory=True requires a CUDA or other accelerator backend",
    ),
    without_mtp(
        "hicache-unified",
        "HiCache in the unified radix cache: it registers its host memory with CUDA",
        (shared_prefix,),
        HICACHE,
        environ=UNIFIED,
        refused="AssertionError: Torch not compiled with CUDA enabled",
    ),
    with_mtp(
        "unified-radix",
        "the unified radix cache, MTP",
        (shared_prefix, reused, batches),
        environ=UNIFIED,
    ),
)
