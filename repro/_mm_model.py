"""Writes a multimodal Gemma-4: a seeded language model, and towers without weights.

The language model is g4debug's text-only one (see ``g4debug.cpu.weights``) under the multimodal
names; its output head is the embedding, as SGLang's multimodal Gemma-4 has it. Vision weights are
left out: SGLang says so and goes on, and a prompt without an image does not reach them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

# What SGLang's processor asks of the tokenizer and the config; no prompt of ours holds them.
_TOKENS = ("image", "video", "audio", "boi", "eoi", "boa", "eoa")
_SWA_NAMES = ("swa_head_dim", "swa_v_head_dim", "swa_num_key_value_heads", "v_head_dim")
_PROCESSOR = {
    "processor_class": "Gemma4Processor",
    "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    "image_processor": {"image_processor_type": "Gemma4ImageProcessor"},
    "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
}
_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def write(geometry: Any, kv_shared: bool, folder: Path, device: str) -> Path:
    """Write ``folder/mm`` for a Geometry; ``kv_shared=False``: each layer has KV of its own.

    Returns the model's path. ``device`` draws the numbers, "cpu" or "cuda".
    """
    from g4debug.cpu.models import write as write_text

    text, _ = write_text(geometry, folder / "text", device=device)
    model = folder / "mm"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir(parents=True)
    shutil.copy(text / "tokenizer.json", model)
    shutil.copy(text / "generation_config.json", model)
    _tokens(text, model)
    _config(geometry, kv_shared, text, model)
    _rename(text, model)
    return model


def _tokens(text: Path, model: Path) -> None:
    settings = json.loads((text / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = {f"{n}_token": f"w{i}" for i, n in enumerate(_TOKENS, 5)}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    extractors = _PROCESSOR["feature_extractor"] | _PROCESSOR["image_processor"]  # type: ignore[operator]
    (model / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR | extractors))
    (model / "processor_config.json").write_text(json.dumps(_PROCESSOR))


def _config(geometry: Any, kv_shared: bool, text: Path, model: Path) -> None:
    """For ``gemma4`` SGLang swaps the head dimensions itself: here ``head_dim`` is the window's."""
    inner = json.loads((text / "config.json").read_text())
    for name in ("architectures", *_SWA_NAMES):
        inner.pop(name)
    inner |= {
        "head_dim": geometry.swa_head_dim,
        "global_head_dim": geometry.head_dim,
        "num_global_key_value_heads": geometry.kv_heads,
        "num_kv_shared_layers": geometry.kv_shared if kv_shared else 0,
        "tie_word_embeddings": True,
    }
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": geometry.dtype,
        "text_config": inner,
        "vision_config": _VISION,
        "audio_config": None,
        "tie_word_embeddings": True,
        **{f"{name}_token_id": i for i, name in enumerate(_TOKENS, 5)},
    }
    (model / "config.json").write_text(json.dumps(config, indent=1))


def _rename(text: Path, model: Path) -> None:
    from safetensors.torch import load_file, save_file

    where: dict[str, str] = {}
    for shard in sorted(text.glob("*.safetensors")):
        tensors = {
            f"model.language_model.{name.removeprefix('model.')}": tensor
            for name, tensor in load_file(shard).items()
            if not name.startswith("lm_head.")
        }
        if tensors:
            save_file(tensors, model / shard.name, {"format": "pt"})
            where |= dict.fromkeys(tensors, shard.name)
    index = {"metadata": {}, "weight_map": where}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
