"""The KV slots of requests, in their rows of `req_to_token`.

SGLang calls these around a draft and a verify. `req_to_token` is `[rows, width]` int32: the slot of
each position of a request. A request i has the row `rows[i]`, and `start[i] <= position < end[i]`
are the positions that count; their slots stand in `slots` one request after another. All but
`req_to_token` are `[bs]`, or `[sum(end - start)]` for the slots, of any integer dtype.

They are needed because SGLang up to 0.5.15 has no branch for a CPU here (it would return None), and
because from 0.5.18 on its branch calls kernels of sgl_kernel that are not installed.

``accepted`` gives the slots of the accepted drafts, which are moved to the front where they were a
tree. ``draft`` gives the slots of a draft that writes KV. With pages of one token it may have
several paths; with larger ones SGLang gives each path pages of its own by Triton kernels.
"""

from __future__ import annotations

from functools import partial

import torch


def move(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    width: int,
    *,
    into_rows: bool,
) -> None:
    """Write `slots` into the rows, or read the rows into `slots`."""
    if req_to_token.shape[1] != width:
        raise ValueError(
            f"CPU engine: got rows of {req_to_token.shape[1]} slots and a width of {width}, "
            "expected the same number; SGLang passes the width of this table."
        )
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        pair = req_to_token[row, first:last], slots[taken : taken + count]
        target, source = pair if into_rows else pair[::-1]
        target.copy_(source)
        taken += count


write = partial(move, into_rows=True)  # `sgl_kernel.assign_req_to_token_pool_cpu`
read = partial(move, into_rows=False)  # `sgl_kernel.assign_extend_cache_locs_cpu`


def extend(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """The slots of `draft_token_num` positions of each request, `[batch_size * draft_token_num]`.

    It stands in for SGLang's own function `assign_extend_cache_locs_func`.
    """
    slots = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
    read(
        req_pool_indices, req_to_token, start_offset, end_offset, slots, req_to_token.shape[1]
    )  # fmt: skip
    return slots


def draft(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    width: int,
    topk: int,
    columns: int,
) -> None:
    """Read the next ``topk * columns`` slots of each request (`assign_draft_cache_locs_contiguous`)

    They stand behind its ``seq_lens`` tokens, and go into `slots`, `[bs * topk * columns]`.
    """
    read(rows, req_to_token, seq_lens, seq_lens + topk * columns, slots, width)


def accepted(index: torch.Tensor, slots: torch.Tensor, found: torch.Tensor) -> None:
    """Write the slot of each accepted token, one behind the other (`fill_accept_out_cache_loc`).

    index: `[bs, depth]`, the place in `slots` of each, or -1. What is left of `found` stays.
    """
    flat = index.reshape(-1)
    taken = slots[flat[flat >= 0].long()]
    found[: len(taken)] = taken.to(found)
