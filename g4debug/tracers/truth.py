"""What the forwards of a server must agree with: SGLang's own rows, and the books of the ledger."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Truth:
    """What a page table, or a write, must agree with. All tensors are on the device of the forward.

    req_to_token: int32 [requests, tokens], token indices of the full pool.
    req_pool_indices: integer [>= rows], the request of each row, as its row of req_to_token. 0 is
        no request (SGLang's padding), and such rows are not judged.
    swa: the table, or the write, is for the SWA pool.
    shadow: int32 [full pages + 1], see :mod:`g4debug.ledger.shadow`.
    mapping: int64 [>= full tokens], SGLang's ``full_to_swa_index_mapping``, which is read only if
        there is no shadow.
    owners: int32 [full pages + 1], the row of req_to_token that each page was handed out to, 0 if
        that is not known. protected: int32 [requests], how many tokens of each row are the prefix
        cache's; those may lie in any page. See :mod:`g4debug.ledger.owners`. Read only if there is
        a shadow, and only beyond ``protected``.
    rows_of: integer [>= rows], the numbers of the rows' requests as ``owners`` knows them, if they
        are not ``req_pool_indices``.
    apart: words of req_to_token between the first tokens of two pages. 0 means the page size, as in
        SGLang's own table; 1 if only the first token of each page is there, as in the copy that is
        made when a forward is launched (:mod:`g4debug.tracers.as_of_launch`).
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
