"""Which tokens a forward writes, as its ForwardBatch says it."""

from __future__ import annotations

from typing import Any

import torch

from g4debug.tracers.kv_writes.check import Rows


def rows_of(batch: Any, tokens: int, captured: bool) -> Rows:
    """The rows of a forward that writes so many locations.

    Where this SGLang, or this kind of forward, does not say which token each location is for,
    ``firsts`` is None. captured: the forward is being captured into a CUDA graph.
    """
    mode, indices = batch.forward_mode, batch.req_pool_indices
    nothing = Rows(rows=1, most=tokens, per_row=tokens)
    if indices is None or batch.seq_lens is None:
        return nothing
    if mode.is_decode():
        return _equal(batch, tokens, 1, -1) or nothing
    if mode.is_target_verify():
        each = int(getattr(batch.spec_info, "draft_token_num", 0) or 0)
        if not each and batch.batch_size:
            each = tokens // batch.batch_size
        return (_equal(batch, tokens, each, 0) if each else None) or nothing
    if mode.name == "EXTEND" and not captured:
        return _ragged(batch, tokens) or nothing
    return nothing


def _equal(batch: Any, tokens: int, each: int, offset: int) -> Rows | None:
    """Rows with ``each`` tokens, the first of which is at ``seq_lens + offset``."""
    rows = tokens // each
    if rows * each != tokens or rows != batch.batch_size:
        return None  # padded for other ranks, or with as many tokens in each row as it likes
    if min(len(batch.req_pool_indices), len(batch.seq_lens)) < rows:
        return None
    return Rows(rows=rows, most=each, firsts=batch.seq_lens, offset=offset, per_row=each)


def _ragged(batch: Any, tokens: int) -> Rows | None:
    """The rows of a prefill: each continues its prefix."""
    starts, counts = batch.extend_start_loc, batch.extend_seq_lens
    firsts, lengths = batch.extend_prefix_lens, batch.extend_seq_lens_cpu
    if any(not isinstance(x, torch.Tensor) for x in (starts, counts, firsts)) or lengths is None:
        return None
    lengths = [int(n) for n in lengths]
    rows = len(lengths)
    if sum(lengths) != tokens or len(batch.req_pool_indices) < rows:
        return None
    if min(len(starts), len(counts), len(firsts)) < rows:
        return None
    most = max(lengths, default=0)
    return Rows(rows, most, firsts, starts=starts, counts=counts, lengths=tuple(lengths))
