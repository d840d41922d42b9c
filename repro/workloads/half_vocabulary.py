"""Writes a toy Gemma-4 and its assistant that use only the lower half of their vocabulary.

The models are TINY with twice as many tokens. The tokens of the upper half have zeros in every
table, so nobody chooses them, and all else is as in TINY: the same prompts give the same answers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_PER_TOKEN = ("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight")
_SIZES = ("vocab_size", "vocab_size_per_layer_input", "num_centroids")


def write(folder: Path) -> tuple[Path, Path]:
    """``folder/target`` and ``folder/assistant``, unless they are there; returns both.

    Several processes may do this at once: the folder appears by one rename.
    """
    from g4debug.cpu.models import tiny_models

    paths = folder / "target", folder / "assistant"
    if folder.exists():
        return paths
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
    try:
        for model in tiny_models():
            to = draft / model.name
            shutil.copytree(model, to)
            for file in to.glob("*.safetensors"):
                _double(file)
            config = json.loads((to / "config.json").read_text())
            (to / "config.json").write_text(json.dumps(_doubled(config)))
        with suppress(OSError):  # another process was faster
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return paths


def _double(file: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("token_ordering"):  # each token once
            tensors[name] = torch.cat([tensor, tensor.new_tensor(range(len(tensor))) + len(tensor)])
        elif name.endswith((*_PER_TOKEN, "centroids.weight")):
            tensors[name] = torch.cat([tensor, torch.zeros_like(tensor)])
    save_file(tensors, file, {"format": "pt"})


def _doubled(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {k: 2 * v if k in _SIZES and v else _doubled(v) for k, v in config.items()}
