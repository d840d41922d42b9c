"""config.json of two published Gemma-4 models, as far as KV pools depend on it.

Public sources: huggingface.co/google/gemma-4-26B-A4B-it and gemma-4-31B-it (config.json and its
copies); head counts also in docs.modular.com (gemma4_assistant: 32 heads, 16 and 4 KV heads).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SHARED: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "vocab_size": 262_144,
    "dtype": "bfloat16",
}


def _config(layers: int, **text: Any) -> dict[str, Any]:
    types = ["sliding_attention"] * 5 + ["full_attention"]
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "text_config": _SHARED
        | {"num_hidden_layers": layers, "layer_types": types * (layers // 6)}
        | text,
    }


A4B_26B = _config(
    30,
    hidden_size=2816,
    intermediate_size=2112,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    enable_moe_block=True,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=704,
)
DENSE_31B = _config(
    60,
    hidden_size=5376,
    intermediate_size=21_504,
    num_attention_heads=32,
    num_key_value_heads=16,
    num_global_key_value_heads=4,
    enable_moe_block=False,
    num_experts=None,
    # SGLang divides by it, experts or not (model_loader's config update).
    moe_intermediate_size=128,
)


def folder(path: Path, config: dict[str, Any]) -> Path:
    """A model folder without weights: all that ServerArgs and ModelConfig read."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path
