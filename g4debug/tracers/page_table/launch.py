"""One guarded hand-over of a page table to the attention kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from g4debug.tracers.page_table.check import Truth


@dataclass
class Launch:
    """One guarded hand-over: what was checked, with the tensors to check it again."""

    backend: Any
    layer: Any
    batch: Any  # ForwardBatch; of a captured graph, its static buffers
    table: torch.Tensor
    seq_lens: torch.Tensor
    cu_q: torch.Tensor | None
    out: torch.Tensor
    pool_name: str  # "full" or "swa": the inner KV pool that the layer reads
    pages: int
    window: int
    truth: Truth | None
    slot: int
    captured: bool
