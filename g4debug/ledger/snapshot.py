"""Takes down indices on the device, in one launch, before SGLang changes anything there.

Indices that SGLang frees or hands out reach the host later, together with indices of other calls
(:mod:`g4debug.ledger.index_transport`). Until then they must be kept as they are now, and so must
their entries in SGLang's mapping: a row of ``req_to_token`` may soon belong to another request, and
a mapping is cleared when its pages are freed. The shadow must learn of them at once, for the
kernels of the next forward (:mod:`g4debug.ledger.shadow`). Each of these would be one to four small
operations; a server that evicts much frees dozens of times before a prefill, and each operation is
one on its host.

For i < n, with t = indices[i]::

    out[i] = t
    out[n + i] = mapping[t], as far as t is inside of it              with a mapping
    shadow[t // page_size] = value                                    with a shadow

An index outside of the pool changes no shadow, and one outside of the mapping is looked up at its
nearest end: a bad index from a broken allocator must not become an access out of bounds.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from g4debug import launching
from g4debug.ledger import shadow as shadows
from g4debug.ledger.books import Pages
from g4debug.ledger.shadow import Marks, put

BLOCK = 1024


@launching.kernel(tensors=4, numbers=6)
def _take_kernel(
    indices,
    mapping,
    shadow,
    out,
    count,
    stride,
    mapped,
    page_size,
    pages,
    value,
    MAPPED: tl.constexpr,
    MARKS: tl.constexpr,
    UNLESS_FREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    token = tl.load(indices + i.to(tl.int64) * stride, mask=inside, other=0).to(tl.int64)
    tl.store(out + i, token, mask=inside)
    if MAPPED:
        known = tl.minimum(tl.maximum(token, 0), mapped - 1)
        tl.store(out + count + i, tl.load(mapping + known, mask=inside, other=0), mask=inside)
    if MARKS:
        word = tl.zeros([BLOCK], tl.int32) + value
        put(shadow, token // page_size, word, inside, pages, UNLESS_FREE)


_launch = launching.Launcher(_take_kernel)


def take(
    indices: Tensor, out: Tensor, mapping: Tensor | None = None, marks: Marks | None = None
) -> None:
    """Take down ``indices`` on the current stream. Never waits.

    indices: int32/int64 [n], of any stride: token indices, or pages with a page_size of 1.
    out: int64, contiguous: [n], or [2 n] with a mapping.
    mapping: int32/int64 [m], contiguous: SGLang's ``full_to_swa_index_mapping``.
    marks: the change of the shadow for these indices.
    """
    if indices.numel():
        (launch if out.is_cuda else reference)(indices, out, mapping, marks)


def words(indices: Tensor, mapping: Tensor | None) -> int:
    """How many words :func:`take` writes."""
    return indices.numel() if mapping is None else 2 * indices.numel()


def read(indices: Tensor, mapping: Tensor | None = None, marks: Marks | None = None) -> Pages:
    """The same values as :func:`take` takes down, on the host. Waits for the device."""
    taken = torch.empty(words(indices, mapping), dtype=torch.int64, device=indices.device)
    take(indices, taken, mapping, marks)
    found: Pages = taken.cpu().numpy()
    return found


def launch(indices: Tensor, out: Tensor, mapping: Tensor | None, marks: Marks | None) -> None:
    """:func:`take` by the kernel, for at least one index."""
    shadow, page_size, value, unless_free = marks or Marks(out)
    mapped, pages = 1 if mapping is None else mapping.numel(), shadow.numel() - 1
    count = indices.numel()
    _launch(
        (-(-count // BLOCK), 1, 1),
        (indices, out if mapping is None else mapping, shadow, out),
        (count, indices.stride(0), mapped, page_size, pages, value),
        (mapping is not None, marks is not None, unless_free, BLOCK),
    )


def reference(indices: Tensor, out: Tensor, mapping: Tensor | None, marks: Marks | None) -> None:
    """:func:`take` in torch."""
    count, tokens = indices.numel(), indices.to(torch.int64)
    out[:count] = tokens
    if mapping is not None:
        out[count : 2 * count] = mapping[tokens.clamp(0, mapping.numel() - 1)]
    if marks is not None:
        shadow, page_size, value, unless_free = marks
        shadows.reference(shadow, tokens, page_size, value, unless_free=unless_free)
