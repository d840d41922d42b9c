"""A sliding layer's lists before a replay on triton, without asking the device for their length.

Before each replay of a verify's CUDA graph, SGLang 0.5.12's triton backend translates the window's
list of tokens into the SWA pool's own (``update_sliding_window_buffer_cuda_graph``). It cuts the
static list at its end, and only the device knows that end: Python asks twice, and waits for all
that the stream has to do. With overlap scheduling the last verify still runs then, so the next one
cannot be launched before it is done. (Seen with SGLang's profiler on a H100, batch 1: 10.8 ms of a
step of 17 ms.)

Here so much of the list is translated as the host knows it can be long, and what lies behind its
end becomes 0. A kernel does not read that far. SGLang 0.5.15.post1 still asks, 0.5.23 does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TRANSLATE = "translate_loc_from_full_to_swa"


def around_window_lists(
    call_next: Callable[..., Any],
    window_kv_indptr: torch.Tensor,
    window_kv_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    sliding_window_size: int,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    bs: int,
    token_to_kv_pool_allocator: Any = None,
) -> Any:
    """Around ``update_sliding_window_buffer_cuda_graph``; returns what it returns.

    window_kv_indptr: (rows + 1,) int32; window_kv_indices: (rows * window,) int64, static. Both on
    the device. sliding_window_size: the most tokens of a row.
    """
    made = call_next(
        window_kv_indptr, window_kv_indices, req_to_token, sliding_window_size, seq_lens,
        req_pool_indices, bs, None,
    )  # fmt: skip
    if hasattr(token_to_kv_pool_allocator, TRANSLATE):
        lists = window_kv_indices[: bs * sliding_window_size]
        place = torch.arange(len(lists), dtype=window_kv_indptr.dtype, device=lists.device)
        tokens = torch.where(place < window_kv_indptr[bs], lists, 0)
        lists.copy_(getattr(token_to_kv_pool_allocator, TRANSLATE)(tokens))
    return made
