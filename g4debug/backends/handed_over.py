"""The objects that a backend hands to an attention kernel: a page table, or lists of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class PageTable:
    """A page table as it is handed to the kernel.

    table: int32/int64 [rows, columns], page numbers. seq_lens: integer [rows], for how many tokens
    of each row the kernel may read KV. cu_q: integer [rows + 1], the running sum of the query
    lengths, or None for one query token in each row. window: how many tokens before a query token a
    sliding layer sees.
    """

    table: torch.Tensor
    seq_lens: torch.Tensor
    cu_q: torch.Tensor | None
    window: int


@dataclass(slots=True)
class TokenLists:
    """The lists of one forward, for the layers of one kind. All tensors are on one device.

    indices: int32/int64 [size], contiguous: token indices of the pool (kv_indices).
    indptr: int32/int64 [rows + 1], contiguous: where each row's list begins (kv_indptr).
    lengths: integer [>= rows]; row r has ``lengths[r] + extra`` tokens.
    window: how many tokens of a row are listed at most, -1 for all of them.
    splits: int32 [>= rows], into how many parts a decode cuts each row (num_kv_splits), or None.
        1..max_splits are valid.
    offsets: integer [>= rows], the position of each row's first entry (window_kv_offsets), or None.
    mask_starts: integer [>= rows], where each row's part of the mask begins (mask_indptr), or None.
        The mask has ``mask_size`` cells, and each of a row's ``queries`` query tokens has a line of
        n + queries cells in it.
    """

    indices: torch.Tensor
    indptr: torch.Tensor
    lengths: torch.Tensor
    extra: int = 0
    window: int = -1
    splits: torch.Tensor | None = None
    max_splits: int = 1
    offsets: torch.Tensor | None = None
    mask_starts: torch.Tensor | None = None
    mask_size: int = 0
    queries: int = 0

    @property
    def rows(self) -> int:
        return self.indptr.shape[0] - 1
