"""The KV slots of requests, in their rows of `req_to_token`.

SGLang calls these around a draft and a verify. `req_to_token` is `[rows, width]` int32: the slot of
each position of a request. A request i has the row `rows[i]`, and `start[i] <= position < end[i]`
are the positions that count; their slots stand in `slots` one request after another. All but
`req_to_token` are `[bs]`, or `[sum(end - start)]` for the slots, of any integer dtype.

They are needed because SGLang up to 0.5.15 has no branch for a CPU here (it would return None), and
because from 0.5.18 on its branch calls kernels of sgl_kernel that are not installed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def write(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Write `slots` into the rows (`sgl_kernel.assign_req_to_token_pool_cpu`)."""
    _check_width(req_to_token, width)
    for row, positions, at in _spans(rows, start, end):
        req_to_token[row, positions] = slots[at].to(req_to_token)


def read(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Read the rows into `slots` (`sgl_kernel.assign_extend_cache_locs_cpu`)."""
    _check_width(req_to_token, width)
    for row, positions, at in _spans(rows, start, end):
        slots[at] = req_to_token[row, positions].to(slots)


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


def _spans(
    rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> Iterator[tuple[int, slice, slice]]:
    """For each request its row, its positions in the row, and where their slots stand."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        yield row, slice(first, last), slice(taken, taken + last - first)
        taken += last - first


def _check_width(req_to_token: torch.Tensor, width: int) -> None:
    if req_to_token.shape[1] != width:
        raise ValueError(
            f"CPU engine: got rows of {req_to_token.shape[1]} slots and a width of {width}, "
            "expected the same number; SGLang passes the width of this table."
        )
