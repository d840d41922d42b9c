"""Writes a multimodal Gemma-4: a seeded language model, and a vision tower if one is asked for.

The language model is g4debug's text-only one (see ``g4debug.cpu.weights``) under the multimodal
names; its output head is the embedding, as SGLang's multimodal Gemma-4 has it. Without a vision
tower its weights are left out: SGLang says so and goes on, and a prompt without an image does not
reach them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What SGLang's processor asks of the tokenizer and the config: ids 5 and up, each with a word of
# its own, which stands in no other word.
_TOKENS = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>", "boi": "<|image>",
           "eoi": "<image|>", "boa": "<|audio>", "eoa": "<audio|>"}  # fmt: skip
FIRST_WORD = 5 + len(_TOKENS)  # the first id of a plain word
_TEXT_ONLY = ("architectures", "v_head_dim", "swa_head_dim", "swa_v_head_dim",
              "swa_num_key_value_heads")  # fmt: skip
_PROCESSOR: dict[str, Any] = {
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


def write(
    geometry: Any,
    kv_shared: bool,
    folder: Path,
    device: str,
    tower: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``folder/mm`` for a Geometry; ``kv_shared=False``: each layer has KV of its own.

    Returns the model's path; the assistant is ``folder/text/assistant``. ``device`` draws the
    numbers, "cpu" or "cuda". tower: a Gemma4VisionConfig's values; its weights are written, too,
    and images can be given, which become at most 70 tokens each.
    """
    from g4debug.cpu.models import write as write_text

    text, _ = write_text(geometry, folder / "text", device=device)
    model = folder / "mm"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir(parents=True)
    shutil.copy(text / "generation_config.json", model)
    vision = _VISION | dict(tower or {})
    _tokens(text, model)
    _processor(vision, model)
    inner = json.loads((text / "config.json").read_text())
    inner["num_kv_shared_layers"] = geometry.kv_shared if kv_shared else 0
    tokens = {f"{name}_token_id": i for i, name in enumerate(_TOKENS, 5)}
    (model / "config.json").write_text(json.dumps(config(inner, vision, **tokens), indent=1))
    where = _rename(text, model)
    if tower is not None:
        where |= _vision_weights(geometry.hidden, vision, model)
    index = {"metadata": {}, "weight_map": where}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def _tokens(text: Path, model: Path) -> None:
    settings = json.loads((text / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = {f"{n}_token": word for n, word in _TOKENS.items()}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((text / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for i, word in enumerate(_TOKENS.values(), 5):
        del vocabulary[f"w{i}"]
        vocabulary[word] = i
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def _processor(vision: dict[str, Any], model: Path) -> None:
    """A picture has at most 70 x 9 patches, the fewest that Gemma-4's processor knows."""
    given = {name: vision[name] for name in ("patch_size", "pooling_kernel_size") if name in vision}
    image = _PROCESSOR["image_processor"] | given | {"max_soft_tokens": 70}
    whole = _PROCESSOR | {"image_processor": image}
    flat = _PROCESSOR["feature_extractor"] | image
    (model / "preprocessor_config.json").write_text(json.dumps(whole | flat))
    (model / "processor_config.json").write_text(json.dumps(whole))


def config(text: Mapping[str, Any], vision: Mapping[str, Any], **tokens: int) -> dict[str, Any]:
    """The config.json for the text-only one, a Gemma4VisionConfig, and the ids of special tokens.

    For ``gemma4`` SGLang swaps the head dimensions itself: here ``head_dim`` is the window's.
    """
    inner = {name: value for name, value in text.items() if name not in _TEXT_ONLY}
    inner |= {
        "head_dim": text["swa_head_dim"],
        "num_key_value_heads": text["swa_num_key_value_heads"],
        "num_global_key_value_heads": text["num_key_value_heads"],
        "tie_word_embeddings": True,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": text["dtype"],
        "text_config": inner,
        "vision_config": vision,
        "audio_config": None,
        "tie_word_embeddings": True,
        **tokens,
    }


def _rename(text: Path, model: Path) -> dict[str, str]:
    """Write the language model's tensors; the file of each."""
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
    return where


def _vision_weights(hidden: int, vision: dict[str, Any], model: Path) -> dict[str, str]:
    """Seeded, under the names of transformers' own tower: norms near 1, the rest keeps sizes."""
    import torch
    from safetensors.torch import save_file
    from transformers import Gemma4VisionConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel

    generator = torch.Generator().manual_seed(0)
    shapes = {
        f"model.vision_tower.{name}": tuple(tensor.shape)
        for name, tensor in Gemma4VisionModel(Gemma4VisionConfig(**vision)).state_dict().items()
        if tensor.is_floating_point() and tensor.dim()
    }
    shapes["model.embed_vision.embedding_projection.weight"] = (hidden, vision["hidden_size"])
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
    save_file(tensors, model / "vision.safetensors", {"format": "pt"})
    return dict.fromkeys(tensors, "vision.safetensors")
