"""Reads the config.json of a model with an SWA pool as SGLang does to size its KV pools.

Source, for Gemma-4: SGLang 0.5.12.post1, ``utils/hf_transformers/config.py:136`` (which attributes
of a checkpoint describe the sliding layers) and ``configs/model_config.py``
(``_derive_model_shapes``, ``get_num_kv_heads``, ``get_swa_num_kv_heads``,
``get_hybrid_layer_ids``). For the others, which earlier releases do not all know: the same
functions of 0.5.23, and each model's ``get_attention_sliding_window_size``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ARCHITECTURES: Final = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
# The other models with an SWA pool -> how many tokens behind the current one SGLang keeps less than
# the config's window has.
OTHERS: Final[Mapping[str, int]] = {
    "GptOssForCausalLM": 1,
    "GraniteMoeSWAForCausalLM": 1,
    "GraniteSWAForCausalLM": 1,
    "LagunaForCausalLM": 1,
    "Llama4ForConditionalGeneration": 0,
    "MellumForCausalLM": 1,
    "MiMoV2FlashForCausalLM": 0,
    "MiMoV2ForCausalLM": 0,
    "Step3p5ForCausalLM": 0,
}
LAYER_TYPES: Final = {"sliding_attention": "swa", "full_attention": "full"}
# The defaults of Gemma4TextConfig in transformers 5.8.1, for keys that config.json lacks.
DEFAULTS: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
}
DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "bf16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


class ConfigError(ValueError):
    """A config.json cannot be used. The text names the value found and the value expected."""


@dataclass(frozen=True)
class KVGeometry:
    """The numbers that decide how much KV memory a token takes.

    ``full_*`` and ``swa_*`` describe one full layer and one sliding layer. Heads are counted in the
    whole model, dimensions are in elements, and the window is in tokens, with the current one.
    KV-shared layers are counted, too: SGLang gives them a buffer like any other layer.
    """

    name: str
    full_layers: int
    swa_layers: int
    full_heads: int
    full_dims: int  # head_dim + v_head_dim
    swa_heads: int
    swa_dims: int
    window: int
    dtype: str
    experts: int = 0
    kv_shared: int = 0
    gemma: bool = True  # the fix swa-ratio is for it

    def full_bytes(self, tp: int, kv_bytes: int) -> int:
        """Bytes of one token in one full layer on one of ``tp`` GPUs."""
        return max(1, self.full_heads // tp) * self.full_dims * kv_bytes

    def swa_bytes(self, tp: int, kv_bytes: int) -> int:
        """Bytes of one token in one sliding layer on one of ``tp`` GPUs."""
        return max(1, self.swa_heads // tp) * self.swa_dims * kv_bytes

    @property
    def moe(self) -> bool:
        return self.experts > 0


def read(path: Path) -> KVGeometry:
    """The geometry of a config.json, or of the folder that has it. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as e:
        raise ConfigError(
            f"{file}: cannot be read ({e.strerror or e}); expected a model's config.json, "
            "or the folder that holds it"
        ) from e
    except ValueError as e:
        raise ConfigError(f"{file}: is not JSON ({e}); expected a model's config.json") from e
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: got {type(config).__name__}, expected a JSON object")
    return parse(config, file.resolve().parent.name)


def parse(config: Mapping[str, Any], name: str = "model") -> KVGeometry:
    """The geometry of a config as a dict. Raises ConfigError if SGLang would not take it.

    If ``model_type`` is gemma4, ``global_*`` belongs to the full layers and the attribute without a
    prefix to the sliding layers. If it is gemma4_text, ``swa_*`` belongs to the sliding layers and
    the attribute without a prefix to the full layers.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    other = next((name for name in architectures if name in OTHERS), "")
    if other:
        return _other(config, other, name)
    if model_type not in ("gemma4", "gemma4_text") or not set(architectures) & {*ARCHITECTURES}:
        raise ConfigError(
            f"{name}: got model_type {model_type!r}, architectures {architectures}; expected "
            f"gemma4 or gemma4_text with one of {', '.join(ARCHITECTURES)}, or one of "
            f"{', '.join(OTHERS)}: the others have no SWA pool, or one that is not known here"
        )
    nested = model_type == "gemma4"
    text = config.get("text_config") if nested else config
    if not isinstance(text, Mapping):
        raise ConfigError(f"{name}: got no text_config, expected one in a {model_type} config")
    numbers = _Numbers(text, name)
    layers = _layer_kinds(text, numbers, name)
    if nested:
        swa_head = numbers("head_dim")
        swa_heads = numbers("num_key_value_heads")
        full_head = numbers("global_head_dim")
        full_heads = numbers("num_global_key_value_heads", swa_heads)
        swa_v, full_v = numbers("swa_v_head_dim", swa_head), numbers("v_head_dim", full_head)
    else:
        full_head = numbers("head_dim")
        full_heads = numbers("num_key_value_heads")
        swa_head = numbers("swa_head_dim", full_head)
        swa_heads = numbers("swa_num_key_value_heads", full_heads)
        full_v, swa_v = numbers("v_head_dim", full_head), numbers("swa_v_head_dim", swa_head)
    return KVGeometry(
        name=name,
        full_layers=layers.count("full"),
        swa_layers=layers.count("swa"),
        full_heads=full_heads,
        full_dims=full_head + full_v,
        swa_heads=swa_heads,
        swa_dims=swa_head + swa_v,
        window=_window(text, numbers),
        dtype=_dtype(config, text),
        experts=numbers("num_experts", 0, low=0),
        kv_shared=numbers("num_kv_shared_layers", 0, low=0),
    )


def _other(config: Mapping[str, Any], architecture: str, name: str) -> KVGeometry:
    """The geometry of a model that is no Gemma. Keys without a prefix are for both kinds."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ConfigError(f"{name}: got text_config={text!r}, expected a JSON object")
    numbers = _Numbers(text, name)
    kinds = _kinds(text, architecture, name)
    all_heads = numbers("num_attention_heads", 1)
    head = numbers("head_dim", numbers("hidden_size", all_heads) // all_heads or 1)
    v_head = numbers("v_head_dim", head, low=0) or head
    swa_head = numbers("swa_head_dim", head)
    heads = numbers("num_key_value_heads", numbers("num_attention_groups", all_heads))
    sliding = text.get("attention_other_setting")
    if isinstance(sliding, Mapping):
        swa_heads = _Numbers(sliding, name)("num_attention_groups", heads)
    else:
        swa_heads = numbers("swa_num_key_value_heads", heads)
    names = ("sliding_window_size", "sliding_window", "attention_chunk_size")
    window = next((key for key in names if text.get(key) is not None), names[1])
    return KVGeometry(
        name=name,
        full_layers=kinds.count("full"),
        swa_layers=kinds.count("swa"),
        full_heads=heads,
        full_dims=head + v_head,
        swa_heads=swa_heads,
        swa_dims=swa_head + numbers("swa_v_head_dim", swa_head),
        window=numbers(window) + 1 - OTHERS[architecture],
        dtype=_dtype(config, text),
        experts=max(numbers(key, 0, low=0) for key in ("num_experts", "num_local_experts")),
        gemma=False,
    )


def _kinds(text: Mapping[str, Any], architecture: str, name: str) -> list[str]:
    """The kind of each layer, full or swa: from the config, or for Llama-4 each fourth is full."""
    count = _Numbers(text, name)("num_hidden_layers")
    pattern, types = text.get("hybrid_layer_pattern"), text.get("layer_types")
    if architecture.startswith("Llama4"):
        kinds = ["full" if i % 4 == 3 else "swa" for i in range(count)]
    elif isinstance(pattern, list):
        kinds = [{"0": "full", "1": "swa"}.get(str(kind), "") for kind in pattern[:count]]
    else:
        listed = types if isinstance(types, list) else []
        kinds = [LAYER_TYPES.get(str(kind), "") for kind in listed[:count]]
    if len(kinds) < count or "" in kinds:
        raise ConfigError(
            f"{name}: got layer_types={types!r}, hybrid_layer_pattern={pattern!r}; expected the "
            f"kind of each of {count} layers: {' or '.join(LAYER_TYPES)}, or 1 and 0"
        )
    if "swa" not in kinds:
        raise ConfigError(f"{name}: got no sliding layer; without one there is no SWA pool")
    return kinds


class _Numbers:
    """Reads whole numbers of a config. A key that is absent or null has its default."""

    def __init__(self, text: Mapping[str, Any], name: str) -> None:
        self._text, self._name = text, name

    def __call__(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self._text.get(key)
        if value is None:
            value = DEFAULTS[key] if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(
                f"{self._name}: got {key}={value!r}, expected a whole number from {low} on"
            )
        return value


def _layer_kinds(text: Mapping[str, Any], numbers: _Numbers, name: str) -> list[str]:
    types = text.get("layer_types")
    if types is None:
        count = numbers("num_hidden_layers")
        types = [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)
        ]
    if not isinstance(types, list) or not types or not set(map(str, types)) <= {*LAYER_TYPES}:
        known = " or ".join(LAYER_TYPES)
        raise ConfigError(f"{name}: got layer_types={types!r}, expected a list of {known}")
    # transformers makes the last layer full, whatever the config says.
    kinds = [*(LAYER_TYPES[t] for t in types[:-1]), "full"]
    if "swa" not in kinds:
        raise ConfigError(f"{name}: got no sliding layer; without one there is no SWA pool")
    return kinds


def _window(text: Mapping[str, Any], numbers: _Numbers) -> int:
    window = numbers("sliding_window")
    return window // 2 + 1 if text.get("use_bidirectional_attention") == "all" else window


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The dtype that ``--dtype auto`` chooses.

    SGLang serves a Gemma as bfloat16 if its dtype is float32 or is not given.
    """
    for holder in (text, config):
        for key in ("dtype", "torch_dtype"):
            if holder.get(key):
                found = str(holder[key]).removeprefix("torch.")
                return "bfloat16" if found in ("float32", "float") else found
    return "bfloat16"
