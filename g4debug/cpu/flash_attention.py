"""Attention over a paged KV cache as FlashAttention 3 takes it (`flash_attn_with_kvcache`).

It is the same as in `paged_attention`, in FlashAttention's words. `page_table` `[bs, columns]` and
`cache_seqlens` `[bs]` say where a row's KV is; `cu_seqlens_q` `[bs + 1]` where its queries begin,
which are its last ones; `window_size` `(left, right)`, inclusive, (-1, -1) for none. The caches are
`[pages, page, kv_heads, dim]`. With `qv` (MLA) Q and the cache of K have two parts: the one that is
rotated, and the one that is V's, too. Whatever no toy model uses is refused.

The kernel is in `sgl_kernel`, a wheel for CUDA only. The scheduler metadata is a plan for its
blocks; the result does not depend on it, so there is none.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from g4debug.cpu.paged_attention import attend, attend_row, refuse

# Options that only say how a GPU computes it.
HOW = (
    "max_seqlen_q",
    "max_seqlen_k",
    "num_splits",
    "ver",
    "cu_seqlens_k_new",
    "scheduler_metadata",
)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    qv: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    softcap: float = 0.0,
    **options: object,
) -> torch.Tensor:
    """Returns `[tokens, heads, dim of V]`."""
    asked = {name: value for name, value in options.items() if name not in HOW}
    left, right = window_size
    refuse(
        "flash_attn_with_kvcache",
        {
            **asked,
            "causal=False": not causal,
            "softcap": softcap or None,
            "a window to the right": right > 0,
        },
    )
    if qv is not None:
        q, k_cache = torch.cat((qv, q), -1), torch.cat((v_cache, k_cache), -1)
    cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return attend(
        "flash_attn_with_kvcache", q, cache, page_table, cache_seqlens, cu_seqlens_q.tolist(),
        float(softmax_scale), 1.0, left, None, out, sinks,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    **options: object,
) -> torch.Tensor:
    """The same without a cache: row b's keys are `k[cu_seqlens_k[b] : cu_seqlens_k[b + 1]]`.

    K and V are `[tokens, heads, dim]`. So a prefill of MLA attends, whose K and V are spread out.
    """
    asked = {name: value for name, value in options.items() if name not in HOW}
    refuse("flash_attn_varlen_func", {**asked, "causal=False": not causal})
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=q.dtype)
    starts, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for (begin, end), (first, last) in zip(pairwise(starts), pairwise(keys), strict=True):
        if end > begin:
            # One page as long as the row, [1, heads, tokens, dim].
            cache = k[first:last].transpose(0, 1)[None], v[first:last].transpose(0, 1)[None]
            attend_row(
                out[begin:end], q[begin:end], cache, [0], 0, last - first,
                float(softmax_scale), 1.0, -1, None,
            )  # fmt: skip
    return out


def get_device_capability(*_args: object) -> tuple[int, int]:
    """SGLang allows fa3 on sm80 and sm90 only."""
    return 9, 0


def get_scheduler_metadata(*_args: object, **_options: object) -> None:
    return None
