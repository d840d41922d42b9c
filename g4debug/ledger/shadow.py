"""The shadow: a copy of the ledger on the device, for kernels.

The shadow says what each page of the full pool is. An event sets, for its i-th token index t, with
page p = t // page_size, if 0 < p < pages::

    shadow[p] = value                         FREE (-1) or HELD (0), or
    shadow[p] = swa[i] // page_size           the SWA page that belongs to it

With ``begins``, this is done only if t is the first token of its page. So a page that was freed
does not look held because a sequence continues in it. With ``unless_free``, it is not done for a
page that is free.

``shadow`` is int32 [pages + 1]. Its last word is 1 while the ledger is sound. If it is 0, a reader
must conclude nothing. Index tensors may come from a broken allocator: an index outside the pool is
skipped, never written. The idea comes from KASAN's shadow memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from g4debug import launching
from g4debug.findings.book_words import FREE as FREE
from g4debug.findings.book_words import HELD as HELD

BLOCK = 1024


class Marks(NamedTuple):
    """A change of the shadow: the word of each index's page becomes ``value``.

    page_size: how many indices a page has. unless_free: pages that are FREE stay so.
    """

    shadow: torch.Tensor
    page_size: int = 1
    value: int = FREE
    unless_free: bool = False

    def make(self, indices: torch.Tensor) -> None:
        """Let it learn of them at once, see :func:`mark`."""
        mark(self.shadow, indices, self.page_size, self.value, unless_free=self.unless_free)


@triton.jit
def put(shadow, page, word, inside, pages, UNLESS_FREE: tl.constexpr):
    """Set the words of these pages, as far as they are pages. Shared by all kernels that do."""
    inside = inside & (page > 0) & (page < pages)
    if UNLESS_FREE:
        inside = inside & (tl.load(shadow + page, mask=inside, other=-1) != -1)
    tl.store(shadow + page, word, mask=inside)


@launching.kernel(tensors=3, numbers=4)
def _mark_kernel(
    shadow,
    indices,
    swa,
    count,
    page_size,
    pages,
    value,
    HAS_SWA: tl.constexpr,
    BEGINS: tl.constexpr,
    UNLESS_FREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    token = tl.load(indices + i, mask=inside, other=0).to(tl.int64)
    page = token // page_size
    if BEGINS:
        inside = inside & (token == page * page_size)
    word = tl.zeros([BLOCK], tl.int32) + value
    if HAS_SWA:
        word = (tl.load(swa + i, mask=inside, other=0).to(tl.int64) // page_size).to(tl.int32)
    put(shadow, page, word, inside, pages, UNLESS_FREE)


_launch = launching.Launcher(_mark_kernel)


def new(pages: int, device: torch.device | str) -> torch.Tensor:
    """A shadow with every page free: int32 [pages + 1]."""
    shadow = torch.full((pages + 1,), FREE, dtype=torch.int32, device=device)
    shadow[pages] = 1
    return shadow


def mark(
    shadow: torch.Tensor | None,
    indices: torch.Tensor,
    page_size: int,
    value: int = HELD,
    swa: torch.Tensor | None = None,
    begins: bool = False,
    unless_free: bool = False,
) -> None:
    """Set the words of the pages of ``indices`` on the current stream. Never waits.

    shadow: None where there is none; then nothing is done. The words of the owners, which are
        int64, are set in the same way.
    indices: int32/int64 [n], token indices of the full pool, of any stride.
    value: FREE or HELD.
    swa: int32/int64 [n], the token indices of the SWA pool that belong to them.
    begins: only set pages that have their first token among the indices.
    unless_free: only set pages that are not free.
    """
    count = indices.numel()
    if shadow is None or count == 0:
        return
    indices, pages = indices.contiguous(), shadow.numel() - 1
    if not shadow.is_cuda:
        reference(shadow, indices, page_size, value, swa, begins, unless_free)
        return
    _launch(
        (-(-count // BLOCK), 1, 1),
        (shadow, indices, indices if swa is None else swa),
        (count, page_size, pages, value),
        (swa is not None, begins, unless_free, BLOCK),
    )


def reference(
    shadow: torch.Tensor,
    indices: torch.Tensor,
    page_size: int,
    value: int = HELD,
    swa: torch.Tensor | None = None,
    begins: bool = False,
    unless_free: bool = False,
) -> None:
    """The same as :func:`mark`, in torch."""
    page = indices.to(torch.int64) // page_size
    word = torch.full_like(page, value) if swa is None else swa.to(torch.int64) // page_size
    inside = (page > 0) & (page < shadow.numel() - 1)
    if begins:
        inside &= indices == page * page_size
    if unless_free:
        inside &= shadow[torch.where(inside, page, 0)] != FREE
    shadow[page[inside]] = word[inside].to(shadow.dtype)
