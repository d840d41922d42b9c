"""Counts the frees of a part of a page, and the SWA pages that are freed when they are free.

The upstream fix (#27779; 0.5.14, ``SWATokenToKVPoolAllocator.free_swa``) clears the mapping of the
whole page. Without it the page's other tokens still map to the SWA page that was freed, and a later
call frees it again.
"""

from __future__ import annotations

from typing import Any

from suites.history.counter import Counter, around, swa_allocator


def install(counter: Counter) -> None:
    import torch

    @around(swa_allocator(), "free_swa")
    def free_swa(allocator: Any, slots: torch.Tensor) -> None:
        size, mapping = allocator.page_size, allocator.full_to_swa_index_mapping
        if not slots.numel():
            return
        pages = torch.unique(slots // size)
        whole = (pages[:, None] * size + torch.arange(size, device=pages.device)).flatten()
        mine = mapping[slots]
        if (mapping[whole] > 0).sum() > (mine > 0).sum():
            counter.reached()
        swa = allocator.swa_attn_allocator
        free = torch.cat((swa.free_pages, swa.release_pages))
        twice = torch.isin(torch.unique(mine[mine > 0] // size), free)
        if twice.any():
            counter.triggered("a SWA page is freed that is free", int(twice.sum()))
