"""Lets triton's attention of prompts, and of a verify, run in smaller blocks on a Hopper chip.

``extend_attention_fwd`` computes prefills on SGLang's triton backend, and with split backends also
the target's verify. For a head_dim of 129 to 256 on sm90, SGLang 0.5.12 gives it 128 queries to a
block. That is more than fits into the registers: compiled for sm90 (head_dim 256, custom mask,
triton 3.9, ``ptxas -v``), a thread spills 2,564 bytes, and 68 with 64 queries. Upstream made it 64
(sglang #26588, in 0.5.13); this is the same choice for 0.5.12. Keys are still taken in blocks of
64, so each query adds up the same numbers in the same order.

How it was found: in the timeline of ``benchmarks/frozen_kv_mtp_v2.py`` on a H100, batch 64, this
kernel takes 33.6 ms of a step on 0.5.12.post1, and 11.2 ms on 0.5.15.post1. With this path a token
of ``frozen-kv-mtp-v2`` takes half of the time there, and the accept length is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import source

SITE = "attn.triton.extend_blocks"
QUERIES = 64  # in a block
_AT = 3  # where BLOCK_M is in what SGLang's function returns


def fits(head_dim: int) -> bool:
    """True if this chip and this head_dim are those for which upstream made the blocks smaller."""
    from sglang.srt.layers.attention.triton_ops import extend_attention as kernel

    if not kernel._is_cuda:
        return False
    return 128 < head_dim <= 256 and kernel.CUDA_CAPABILITY[0] == 9


def around_block_sizes(call_next: Callable[..., Any], Lq: int, Lv: int) -> tuple[Any, ...]:
    """Around the function that chooses the blocks.

    Returns (BLOCK_DMODEL, BLOCK_DPE, BLOCK_DV, BLOCK_M, BLOCK_N, num_warps).
    """
    sizes = list(call_next(Lq, Lv))
    if fits(Lq):
        sizes[_AT] = min(sizes[_AT], QUERIES)
    return tuple(sizes)


def still_broken() -> bool:
    """True if sm90 has blocks of 128 queries for a head_dim up to 256."""
    from g4debug.hooking import targets

    text = source(targets.path(SITE) or "")
    hopper = text.partition("CUDA_CAPABILITY[0] >= 9")[2].partition("CUDA_CAPABILITY[0] >= 8")[0]
    return "Lq <= 256:\n                BLOCK_M, BLOCK_N = (128, 64)" in hopper


FIX = Fix(
    id="hopper-extend-blocks",
    title="triton's prefill and verify on a Hopper chip in blocks of 64 queries",
    seed="none; found by this project",
    upstream="sglang #26588, in 0.5.13",
    needs=">=0.5.12,<0.5.13",
    still_broken=still_broken,
    hooks=(around(SITE, around_block_sizes),),
    purpose="performance",
    elsewhere={">=0.5.13": "SGLang itself has these blocks"},
    eligible="on CUDA sm90, on triton, with a head_dim of 129 to 256",
)
