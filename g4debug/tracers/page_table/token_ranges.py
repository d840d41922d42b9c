"""What ``watch`` changes beside the entries of lists: only what leads a kernel out of memory.

``watch`` has no books, and may be on a server of a kind that nobody has run. If g4debug has a wrong
idea of the lengths there, a word that differs from them is the right one. So a word that differs
is told, and stays. With ``Repair.RANGES`` the words of a forward are changed in two cases:

* ``kv_indptr``: if for any row ``0 <= begin <= end <= size`` of the list does not hold. Then all
  words of it become what the lengths say, cut at the end of the list.
* ``mask_indptr`` and ``window_kv_offsets``: of a row of which a kernel would read outside of the
  mask. It has a line of ``offset + listed + queries`` cells for each of the row's queries.

Entries that lie behind the lengths are read where ``kv_indptr`` leads to them. Those that are no
token of the pool become token 0, too, as all others do. ``num_kv_splits`` never changes: any
value of it leaves a part of a row unread, and reads nothing else.

This is the torch reference. :mod:`g4debug.tracers.page_table.token_ranges_guard` does the same.
"""

from __future__ import annotations

import torch

from g4debug.backends.handed_over import TokenLists


def mend(
    lists: TokenLists, begins: torch.Tensor, listed: torch.Tensor, starts: torch.Tensor, tokens: int
) -> None:
    """Change what a kernel would leave its memory by.

    begins, listed, starts: as in ``token_check.ListCheck``. tokens: of the pool.
    """
    rows, size = lists.rows, lists.indices.shape[0]
    words = lists.indptr[: rows + 1].to(torch.int64)
    left, right, ends = words[:-1], words[1:], begins + listed
    if bool(((left < 0) | (right < left) | (right > size)).any()):
        read = ends.clamp(max=size) - begins.clamp(max=size)
        lists.indptr[1 : rows + 1] = ends.clamp(max=size).to(lists.indptr.dtype)
        lists.indptr[0] = 0
    else:
        read = right - left
        behind = lists.indices[int(ends[-1]) : int(right[-1])]
        behind[(behind < 0) | (behind >= tokens)] = 0
    if lists.mask_starts is not None:
        _mask(lists, lists.mask_starts[:rows], read, listed, starts)


def _mask(
    lists: TokenLists,
    words: torch.Tensor,
    read: torch.Tensor,
    listed: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    queries, size = lists.queries, lists.mask_size
    needs = queries * (starts + listed + queries)
    right = needs.cumsum(0) - needs
    offsets, first = torch.zeros_like(read), torch.zeros_like(read)
    if lists.offsets is not None:
        offsets, first = lists.offsets[: len(read)].to(torch.int64), starts
    outside = (words < 0) | (offsets < 0) | (offsets > size)
    outside |= words > size - queries * (offsets + read + queries)
    fits = right <= size - queries * (first + read + queries)
    words[outside] = torch.where(fits, right, 0)[outside].to(words.dtype)
    if lists.offsets is not None:
        lists.offsets[: len(read)][outside] = starts[outside].to(lists.offsets.dtype)
