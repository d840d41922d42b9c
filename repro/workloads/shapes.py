"""Other models than Gemma-4 on a GPU: their real shapes, with weights that SGLang draws itself.

Where a KV page goes depends on shapes, lengths and requests, not on what the weights say. So a
config is enough: SGLang fills the model with ``--load-format dummy``. The configs are those that
the makers published for Llama 3 8B, Qwen3 8B and gpt-oss 20B (in bfloat16, without its MXFP4
weights); the drafts are one layer of the same width, as EAGLE's are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.workload import GPU_ENGINE, Make, Workload, in_memory

_COMMON: dict[str, Any] = {"dtype": "bfloat16", "hidden_act": "silu", "use_cache": True}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_GPT_OSS_LAYERS = 24
SHAPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "gpt-oss": {
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": _GPT_OSS_LAYERS,
        "layer_types": ["sliding_attention", "full_attention"] * (_GPT_OSS_LAYERS // 2),
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
    },
}
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle": {**_LLAMA, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1},
    "eagle3": {
        **_LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": _LLAMA["vocab_size"],
    },
}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


def written(name: str, config: dict[str, Any]) -> Path:
    folder = in_memory(f"g4debug-shape-{name}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def engine(model: str, draft: str = "", **overrides: Any) -> dict[str, Any]:
    """Arguments of ``sgl.Engine``: the shape of a model of SHAPES, with a draft of DRAFTS or
    ``ngram``. The attention backends are SGLang's choice, unless ``overrides`` name some."""
    arguments = {
        "model_path": str(written(model, SHAPES[model])),
        "load_format": "dummy",
        **GPU_ENGINE,
        "cuda_graph_max_bs": int(overrides.get("max_running_requests", 12)),
        "mem_fraction_static": 0.75,
        "chunked_prefill_size": 1024,
        "context_length": 8192,
        "decode_log_interval": 1,
    }
    if draft:
        arguments |= {"speculative_algorithm": draft.upper()}
        arguments |= {} if draft == "ngram" else TREE
    if draft in DRAFTS:
        arguments["speculative_draft_model_path"] = str(written(draft, DRAFTS[draft]))
    return arguments | overrides


def served(model: str, draft: str = "", **overrides: Any) -> dict[str, Make]:
    """A workload of long prompts and short answers on a shape; for a GPU only."""

    def cuda(requests: int | None) -> Workload:
        count = requests or 16
        arguments = engine(
            model, draft, max_running_requests=count, max_total_tokens=64 * 400, **overrides
        )
        vocab = SHAPES[model]["vocab_size"]
        return Workload(count, (600, 1000), 60, vocab, arguments, timeout=400)

    return {"cuda": cuda}


TRITON = {"attention_backend": "triton"}
LLAMA, LLAMA_TRITON = served("llama"), served("llama", **TRITON)
LLAMA_FLASHINFER = served("llama", attention_backend="flashinfer")
EAGLE, EAGLE_TRITON = served("llama", "eagle"), served("llama", "eagle", **TRITON)
GPT_OSS, GPT_OSS_TRITON = served("gpt-oss"), served("gpt-oss", **TRITON)
QWEN3 = served("qwen3")
# Graphs of prefills are captured with chunks that are longer than any prompt may be, by dummy
# requests of which there is none; and no thread overlaps, so that no copy tells what was launched.
SHORT_CONTEXT = served(
    "llama", disable_overlap_schedule=True, context_length=1088, chunked_prefill_size=4096
)
EAGLE_TREE = served("llama", "eagle", speculative_eagle_topk=4, speculative_num_draft_tokens=8)
