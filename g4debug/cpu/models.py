"""Writes the toy checkpoints that SGLang's own loader reads: config, safetensors, tokenizer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from g4debug.cpu.geometry import E2B, E4B_256, SPECIAL_TOKENS, TINY, Geometry

__all__ = ["E2B", "E4B_256", "TINY", "Checkpoint", "Geometry", "tiny_models", "write"]

CODE_VERSION: Final = 1  # raise it whenever weights.py gives other numbers
SHARD_BYTES: Final = 4_500_000_000  # a larger tensor still gets a shard of its own
STAMP: Final = "g4debug-model.json"


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder. tensors: by the names that they have in a checkpoint of Hugging Face's.

    The words of its tokenizer are `words` in number, and a sequence has at most `max_position`.
    """

    folder: str
    config: Mapping[str, Any]
    tensors: Iterator[tuple[str, Any]]
    words: int
    max_position: int


def tiny_models() -> tuple[Path, Path]:
    """The folders of the TINY target and assistant, written once to :func:`kept`."""
    return write(TINY, kept() / "tiny")


def kept() -> Path:
    """The folder in the user's cache directory where toy models are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "g4debug" / "models"


def write(
    geometry: Geometry, directory: Path | str, seed: int = 0, device: str = "cpu"
) -> tuple[Path, Path]:
    """Write `directory/target` and `directory/assistant`, unless they are there already.

    With `device="cuda"` the GPU draws the numbers, which takes seconds for E4B_256; they are not
    those that a CPU draws.
    """
    directory = Path(directory)
    stamp = {
        "geometry": asdict(geometry) | {"votes": list(geometry.votes)},
        "seed": seed,
        "device": device.split(":")[0],
        "code": CODE_VERSION,
    }

    def checkpoints() -> Iterator[Checkpoint]:
        from g4debug.cpu import weights

        made = weights.Weights(geometry, seed, device)
        for name, config, tensors in (
            ("target", geometry.target_config(), weights.target_tensors(made)),
            ("assistant", geometry.assistant_config(), weights.assistant_tensors(made)),
        ):
            yield Checkpoint(name, config, tensors, geometry.vocab, geometry.max_position)

    write_once(directory, stamp, checkpoints)
    return directory / "target", directory / "assistant"


def write_once(
    directory: Path, stamp: Mapping[str, Any], checkpoints: Callable[[], Iterable[Checkpoint]]
) -> None:
    """Write the checkpoints into `directory`, unless it has this stamp already.

    Several processes may do this at once: one of them writes, and the directory appears by one
    rename.
    """
    if _stamp_of(directory) == stamp:
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write(directory, stamp, checkpoints)


def _write(
    directory: Path, stamp: Mapping[str, Any], checkpoints: Callable[[], Iterable[Checkpoint]]
) -> None:
    if _stamp_of(directory) == stamp:
        return  # another process was faster
    if directory.exists() and _stamp_of(directory) is None and any(directory.iterdir()):
        raise FileExistsError(
            f"{directory} has other files in it: choose an empty directory, or one that g4debug "
            "wrote."
        )
    draft = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    draft.mkdir(exist_ok=True)
    try:
        for checkpoint in checkpoints():
            folder = draft / checkpoint.folder
            folder.mkdir(parents=True)
            _save_tensors(folder, checkpoint.tensors, checkpoint.config["dtype"])
            _write_json(folder / "config.json", checkpoint.config)
            _save_tokenizer(folder, checkpoint)
        _write_json(draft / STAMP, stamp)
        shutil.rmtree(directory, ignore_errors=True)
        draft.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _stamp_of(directory: Path) -> Any:
    try:
        return json.loads((directory / STAMP).read_text())
    except FileNotFoundError:
        return None


def _save_tensors(folder: Path, tensors: Iterator[tuple[str, Any]], dtype_name: str) -> None:
    """Write the tensors as shards with Hugging Face's names, and an index.

    Floats are converted to the model's dtype.
    """
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, dtype_name)
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        if shard:
            save_file(shard, folder / f"shard-{len(shards):05}.safetensors", {"format": "pt"})
            shards.append(list(shard))
        shard, size = {}, 0

    for name, tensor in tensors:
        stored = (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        if size + stored.nbytes > SHARD_BYTES:
            flush()
        shard[name] = stored
        size += stored.nbytes
        total += stored.nbytes
    flush()
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{number:05}.safetensors").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    _write_json(folder / "model.safetensors.index.json", index)


def _save_tokenizer(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a tokenizer with one word for each token: `w4 w5 ...`, split at white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(len(SPECIAL_TOKENS), checkpoint.words))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "model_max_length": checkpoint.max_position,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {"eos_token_id": 1, "bos_token_id": 2})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
