"""The place of a token's KV, by SGLang's rows, and the state of its page, by the ledger's books.

:func:`resolve` is for Triton kernels, and :func:`resolve_tokens` is the same in torch. For a token
of the request in row ``request`` of ``req_to_token``::

    place = req_to_token[request, index] + within    in the full pool; none if that is negative
    page  = place // page_size                       it exists if 0 < page < pages

    freed   = the shadow says that the page is free (ledger/shadow.py)
    foreign = the page was handed out for another column, or it was to another request and the
              token's page begins behind what the prefix cache lent to this one (ledger/owners.py)
    cached  = the token itself lies in the part of the request that the prefix cache has

    own_page = of the SWA pool: the shadow's word of the page, or where there is no shadow, the
               mapping's of the place; of the full pool it is the page itself

A book that is void says nothing: in it no page exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from g4debug.findings.book_words import EVERYTHING, FREE, HIGH
from g4debug.sanitizer.reference_state import Truth

UNKNOWN = -1


@triton.jit
def resolve(
    req_to_token,
    book,  # the shadow, or where there is none the full-to-SWA mapping
    owners,
    protected,
    request,
    theirs,
    index,
    within,
    position,
    begins,
    inside,
    words,
    known,  # words of the book: full pages, or tokens of the mapping
    stride,
    page_size,
    HAS_SHADOW: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    SWA: tl.constexpr,
    FREE: tl.constexpr = FREE,
    EVERYTHING: tl.constexpr = EVERYTHING,
):
    """(judged, place, page, own_place, own_page, freed, foreign, cached), see :class:`Resolved`.

    request, theirs: a row of ``req_to_token``, and whether it is some request's. index .. inside:
    blocks, as for ``resolve_tokens``.
    """
    judged = inside & (index < tl.where(theirs, words, 0))
    token = tl.load(req_to_token + request * stride + index, mask=judged, other=-1).to(tl.int64)
    place = tl.where(token >= 0, token + within, -1)
    page = tl.where(token >= 0, place // page_size, -1)
    own_place, own_page = place, page
    freed = page < -1
    foreign = freed
    cached = freed
    if HAS_SHADOW:
        last = tl.where(tl.load(book + known) == 1, known, 0)
        exists = (page > 0) & (page < last)
        word = tl.load(book + page, mask=exists, other=0).to(tl.int64)
        freed = exists & (word == FREE)
        if HAS_OWNERS:
            given = tl.load(owners + page, mask=exists, other=0).to(tl.int64)
            kept = tl.load(protected + request, mask=theirs, other=0).to(tl.int64)
            lent = kept >> 32
            until = kept & 4294967295
            elsewhere = (given & 4294967295) - 1 != begins // page_size
            elsewhere = elsewhere | ((given >> 32 != request) & (begins >= lent))
            foreign = exists & (given > 0) & (lent != EVERYTHING) & elsewhere
            cached = exists & (until != EVERYTHING) & (position < until)
        if SWA:
            judged = judged & (page >= 0) & (page < last)
            own_page = word
            own_place = tl.where(word > 0, word * page_size + place % page_size, 0)
    elif SWA:
        judged = judged & (place >= 0) & (place < known)
        own_place = tl.load(book + place, mask=judged, other=-1).to(tl.int64)
        judged = judged & (own_place >= 0)
        own_page = own_place // page_size
    return judged, place, page, own_place, own_page, freed, foreign, cached


@dataclass(frozen=True)
class Resolved:
    """The result of :func:`resolve_tokens` for each token. All tensors have one shape.

    judged: bool, the right place of the token is known. place, page: int64, of the full pool,
    UNKNOWN if ``req_to_token`` names none. own_place, own_page: int64, the same in the layer's own
    pool; FREE and 0 in the SWA pool if the page is freed. They say nothing where ``judged`` is
    false. freed, foreign, cached: bool, see the module.
    """

    judged: torch.Tensor
    place: torch.Tensor
    page: torch.Tensor
    own_place: torch.Tensor
    own_page: torch.Tensor
    freed: torch.Tensor
    foreign: torch.Tensor
    cached: torch.Tensor


def resolve_tokens(
    truth: Truth,
    row: torch.Tensor,
    index: torch.Tensor,
    within: torch.Tensor | int,
    position: torch.Tensor,
    inside: torch.Tensor,
    page_size: int,
) -> Resolved:
    """Resolve tokens of the rows ``row`` of a batch.

    index: in the request's row of ``req_to_token``, >= 0. within: the number that is added to its
    content. position: of the token in its request. inside: bool, the tokens that are resolved at
    all; the others are int64. Their shapes broadcast.
    """
    requests, words = truth.req_to_token.shape
    request = truth.req_pool_indices.to(torch.int64)[row]
    theirs = (request > 0) & (request < requests)
    judged = inside & theirs & (index < words)
    token = truth.req_to_token[request.clamp(0, requests - 1), index.clamp(0, words - 1)]
    token = torch.where(judged, token.to(torch.int64), UNKNOWN)
    place = torch.where(token >= 0, token + within, UNKNOWN)
    page = torch.where(token >= 0, place // page_size, UNKNOWN)
    own_place, own_page = place, page
    freed = foreign = cached = torch.zeros_like(judged)
    if truth.shadow is not None:
        last = torch.where(truth.shadow[-1] == 1, truth.shadow.numel() - 1, 0)
        exists = (page > 0) & (page < last)
        known = torch.where(exists, page, 0)
        word = torch.where(exists, truth.shadow[known].to(torch.int64), 0)
        freed = exists & (word == FREE)
        if truth.owners is not None and truth.protected is not None:
            numbers = request if truth.rows_of is None else truth.rows_of.to(torch.int64)[row]
            given = truth.owners[known].to(torch.int64)
            kept = truth.protected[torch.where(theirs, request, 0)].to(torch.int64)
            lent, until = kept // HIGH, kept % HIGH
            column = position // page_size
            elsewhere = given % HIGH - 1 != column
            elsewhere = elsewhere | ((given // HIGH != numbers) & (column * page_size >= lent))
            foreign = exists & (given > 0) & (lent != EVERYTHING) & elsewhere
            cached = exists & (until != EVERYTHING) & (position < until)
        if truth.swa:
            judged = judged & (page >= 0) & (page < last)
            own_page = word
            own_place = torch.where(word > 0, word * page_size + place % page_size, 0)
    elif truth.swa:
        assert truth.mapping is not None
        judged = judged & (place >= 0) & (place < truth.mapping.numel())
        own_place = truth.mapping[torch.where(judged, place, 0)].to(torch.int64)
        judged = judged & (own_place >= 0)
        own_page = own_place // page_size
    return Resolved(judged, place, page, own_place, own_page, freed, foreign, cached)
