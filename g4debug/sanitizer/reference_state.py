"""The truth for the forwards of a server: SGLang's own rows, and the books of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger
    from g4debug.sanitizer.snapshot_copy import Copy


# Not frozen, as nothing is that a step makes while its GPU waits: setting the fields of a frozen
# dataclass takes five times as long.
@dataclass(slots=True)
class Truth:
    """The truth for a page table or a write. All tensors are on the device of the forward.

    req_to_token: int32 [requests, tokens], token indices of the full pool.
    req_pool_indices: integer [>= rows], the request of each row, as its row of req_to_token. 0 is
        no request (SGLang's padding), and such rows are not judged.
    swa: the table, or the write, is for the SWA pool.
    shadow: int32 [full pages + 1], see :mod:`g4debug.ledger.shadow`.
    mapping: int64 [>= full tokens], SGLang's ``full_to_swa_index_mapping``, which is read only if
        there is no shadow.
    owners: int64 [full pages + 1], the row and the column that each page was handed out to, 0 if
        that is not known. protected: int64 [requests], how many tokens of each row the prefix cache
        lent, and how many it holds. See :mod:`g4debug.ledger.owners`. Read only if there is a
        shadow.
    rows_of: integer [>= rows], the numbers of the rows' requests as ``owners`` knows them, if they
        are not ``req_pool_indices``.
    apart: words of req_to_token between the first tokens of two pages. 0 means the page size, as in
        SGLang's own table; 1 if only the first token of each page is there, as in the copy that is
        made when a forward is launched (:mod:`g4debug.sanitizer.forward_snapshots`).
    step: int64 [1], the step of that copy. None for SGLang's own tables.
    padding: rows of at most this many tokens are not judged. The padding rows of a CUDA graph keep
        the requests of an earlier batch, so only their length tells that they are padding.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    swa: bool = False
    shadow: torch.Tensor | None = None
    mapping: torch.Tensor | None = None
    owners: torch.Tensor | None = None
    protected: torch.Tensor | None = None
    rows_of: torch.Tensor | None = None
    apart: int = 0
    step: torch.Tensor | None = None
    padding: int = 0


def of_forward(
    pool: Any,
    req_to_token: torch.Tensor,
    indices: torch.Tensor,
    swa: bool,
    padding: int,
    ledger: Ledger | None,
    copy: Copy | None,
    with_shadow: bool = True,
) -> Truth | None:
    """The truth of one forward and pool. None if only ranges can be checked.

    pool: the KV pool of the forward. indices: ``req_pool_indices``. copy: the copy made when the
    forward was launched, if the server overlaps. with_shadow: whether the ledger says which pages
    this forward may have.
    """
    if copy is not None:
        shadow = copy.shadow if with_shadow else None
        if req_to_token is not copy.source or (swa and shadow is None):
            return None  # there is no copy of it, or none of SGLang's mapping
        return Truth(
            req_to_token=copy.first_tokens,
            req_pool_indices=indices,
            swa=swa,
            shadow=shadow,
            owners=copy.owners if shadow is not None else None,
            protected=copy.protected if shadow is not None else None,
            apart=1,
            step=copy.step,
            padding=padding,
        )
    shadow = mapping = owners = protected = None
    if with_shadow and ledger is not None:
        shadow = ledger.shadow
        if ledger.owners is not None:
            owners, protected = ledger.owners.known(req_to_token.shape[0])
    if swa and shadow is None:
        mapping = getattr(pool, "full_to_swa_index_mapping", None)
        if mapping is None:
            return None
    return Truth(
        req_to_token=req_to_token,
        req_pool_indices=indices,
        swa=swa,
        shadow=shadow,
        mapping=mapping,
        owners=owners,
        protected=protected,
        padding=padding,
    )


class Arguments(NamedTuple):
    """A truth as the kernels take it: parts of their parameters, in their order.

    tensors: ``req_to_token``, ``req_pool_indices``, the book (the shadow, or where there is none
    the full-to-SWA mapping), ``owners``, ``protected``, ``step``.
    numbers: rows and words of ``req_to_token``, ``apart``, words of the book, ``padding``.
    stride: of the rows of ``req_to_token``.
    flags: HAS_SHADOW, HAS_OWNERS, HAS_STEP, SWA.
    """

    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    stride: int
    flags: tuple[bool, ...]


def arguments(truth: Truth | None, none: torch.Tensor, apart: int) -> Arguments:
    """The arguments for the launch of a kernel that compares with ``truth``.

    none: any tensor; it stands for a missing one. apart: the number that 0 stands for in a truth.
    """
    if truth is None:
        return Arguments((none,) * 6, (0, 0, apart, 0, 0), 0, (False,) * 4)
    book, known = none, 0
    if truth.shadow is not None:
        book, known = truth.shadow, truth.shadow.numel() - 1
    elif truth.swa:
        assert truth.mapping is not None
        book, known = truth.mapping, truth.mapping.numel()
    owners, protected, step = truth.owners, truth.protected, truth.step
    rows, words = truth.req_to_token.shape
    return Arguments(
        (
            truth.req_to_token,
            truth.req_pool_indices,
            book,
            none if owners is None else owners,
            none if protected is None else protected,
            none if step is None else step,
        ),
        (rows, words, truth.apart or apart, known, truth.padding),
        truth.req_to_token.stride(0),
        (
            truth.shadow is not None,
            truth.shadow is not None and owners is not None and protected is not None,
            step is not None,
            truth.swa,
        ),
    )
