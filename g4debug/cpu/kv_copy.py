"""Copies KV slots inside the pools (`sgl_kernel.copy_all_layer_kv_cache_cpu`).

For each buffer b and each i: `row(b, targets[i]) = row(b, sources[i])`, where row(b, j) is the
`strides[b]` bytes at `pointers[b] + j * strides[b]`. All sources are read before a target is
written, so the two may overlap.

Shapes: pointers `[buffers]` uint64, addresses in this process; strides `[buffers]` int, bytes;
targets and sources `[n]` int. SGLang calls it once when it makes a pool, to warm the kernel up, and
to move accepted drafts, which FROZEN_KV_MTP with one draft path does not need. The stand-in is
needed because SGLang's branch for a CPU calls a kernel that is not installed.
"""

from __future__ import annotations

import ctypes

import torch


def copy(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Raises ValueError if there are not as many targets as sources."""
    moves = list(zip(targets.tolist(), sources.tolist(), strict=True))
    for base, size in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * size, size) for _, source in moves]
        for (target, _), row in zip(moves, rows, strict=True):
            ctypes.memmove(base + target * size, row, size)
