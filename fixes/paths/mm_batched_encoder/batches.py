"""Divides images and frames into as few passes of the vision tower as memory allows.

Source of the idea: vLLM #43169 and seed PR #9. All entries of a pass have the same number of
patches. So there is no padding, and each entry is computed as if it were alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Entry:
    """One image or frame. pixels [patches, patch_pixels], positions int64 [patches, 2]."""

    pixels: torch.Tensor
    positions: torch.Tensor


Piece = Entry | torch.Tensor  # a tensor is an embedding already and is passed on


def collect(items: list[Any], positions_of: str, hidden: int, video: bool) -> list[Piece] | None:
    """The contents of ``items`` (MultimodalDataItem), in order; None if something is unexpected.

    positions_of: the attribute with the patch positions. hidden: a tensor with this last dimension
    is an embedding already. If something is unexpected, SGLang's own code runs and reports it.
    """
    pieces: list[Piece] = []
    for item in items:
        pixels, positions = _flat(item.feature), _flat(getattr(item, positions_of, None))
        for i, tensor in enumerate(pixels):
            if not isinstance(tensor, torch.Tensor):
                return None
            if tensor.dim() in (2, 3) and tensor.shape[-1] == hidden:
                pieces.append(tensor)
                continue
            at = positions[i] if i < len(positions) else None
            if not isinstance(at, torch.Tensor) or tensor.dim() not in (2, 3, 3 + video):
                return None
            if at.dim() != tensor.dim() or at.shape[:-1] != tensor.shape[:-1]:
                return None
            rows = tensor.reshape(-1, *tensor.shape[-2:]), at.reshape(-1, *at.shape[-2:])
            pieces += [Entry(p, q) for p, q in zip(*rows, strict=True)]
    return pieces


def _flat(nested: Any) -> list[Any]:
    if isinstance(nested, list):
        return [leaf for part in nested for leaf in _flat(part)]
    return [nested]


def passes(entries: list[Entry], cost: Callable[[int], int], budget: int) -> list[list[int]]:
    """The indices of the entries of each pass, which takes at most ``budget`` bytes.

    cost: the bytes that an entry takes, by its number of patches. All entries of a pass have the
    same number of patches. An entry that is larger than the budget is a pass of its own.
    """
    buckets: dict[tuple[int, ...], list[int]] = {}
    for i, entry in enumerate(entries):
        buckets.setdefault(tuple(entry.pixels.shape), []).append(i)
    found = []
    for (patches, *_), bucket in buckets.items():
        size = max(1, budget // max(1, cost(patches)))
        found += [bucket[i : i + size] for i in range(0, len(bucket), size)]
    return found


def bytes_of_patches(config: Any, element: int, fused: bool = False) -> Callable[[int], int]:
    """The peak bytes that Gemma4VisionEncoder takes for an entry, by its number of patches.

    config: Gemma4VisionConfig. element: bytes of the tower's dtype. The largest part is the
    position embedding: a one-hot of ``position_embedding_size`` for each patch and axis, in int64
    and then cast. The next are masks and pooling weights of patches x patches, and what a layer
    holds at a time. fused: the path vision-layer is used, which needs neither one-hot nor masks.
    Then only the pooling is as large as patches x patches: a one-hot of soft tokens for each patch,
    in int64 and then cast to float32.
    """
    layer = (16 * config.hidden_size + 6 * config.intermediate_size) * element
    pixels = 3 * config.patch_size**2 * (4 + element)
    one_hot, square = 2 * config.position_embedding_size * (8 + element), 4.0
    if fused:
        one_hot, square = 0, 12 / config.pooling_kernel_size**2

    def cost(patches: int) -> int:
        return int(patches * (one_hot + layer + pixels + square * patches))

    return cost


def device_memory(device: torch.device) -> int:
    """How many bytes of memory the device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def encode(
    tower: Callable[..., Any], entries: list[Entry], batches: list[list[int]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """The soft tokens [n, tower hidden] of each entry, in order. Each batch is one tower call."""
    device = tower.device  # type: ignore[attr-defined]
    tokens, counts = [], []
    for batch in batches:
        pixels = torch.stack([entries[i].pixels.to(device, dtype) for i in batch])
        positions = torch.stack([entries[i].positions.to(device) for i in batch])
        pooled, valid = tower(pixels, positions)
        tokens.append(pooled[valid])
        counts.append(valid.sum(dim=1))
    # This waits for the device only once, for all counts.
    split = torch.split(torch.cat(tokens), torch.cat(counts).tolist())
    order = [i for batch in batches for i in batch]
    found = dict(zip(order, split, strict=True))
    return [found[i] for i in range(len(entries))]
