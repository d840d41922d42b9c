"""Attention of a verify: a few queries of each request read its KV once, in parts side by side.

For query i of row r, with head h of KV head g, over the keys n that it may see::

    out = sum_n softmax_n(scale * q . k_n) * v_n

The keys are the ``prefix`` tokens of the row's list, and behind them its own new tokens. Of the
prefix a query sees the ``window`` newest before it, or all; of the new tokens those that the mask
says, or, without one, those up to itself.

SGLang's kernel for prefills (``extend_attention_fwd``) takes a program for each row and head, with
a block of 64 queries, of which four are there, and reads a row's keys one block after the other.
So with 8 heads on 2 KV heads each key is read four times, and one row keeps 8 of 132 SMs busy.
Here all queries of the heads that share a KV head are one block, so each key is read once, and the
prefix is cut into parts, a program each, whose sums a second kernel puts together. That is the idea
of Flash-Decoding (Dao et al., 2023). SGLang has such a kernel for verifies on MI350
(``verify_splitkv.py``), for layers without a window.

All sums are in float32. The weights of a block are rounded to the dtype of V before its product, as
SGLang's kernel does. The sums have another order, so the last bits of an output differ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MOST_QUERIES = 64  # of the heads of one KV head
WIDEST = 512  # head_dim
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Cut(NamedTuple):
    """keys: in a block. warps, stages: of a program. programs: as many parts as make so many of
    them; most: parts of a row at most."""

    keys: int
    warps: int
    stages: int
    programs: int
    most: int

    def parts(self, programs: int, window: int) -> int:
        """Into how many parts a prefix is cut, a power of two. programs: those of one part."""
        most = self.most if window < 0 else min(self.most, triton.cdiv(window, self.keys))
        wanted = triton.next_power_of_2(triton.cdiv(self.programs, programs))
        parts = 1
        while 2 * parts <= min(wanted, most):
            parts *= 2
        return parts


@triton.jit
def _block(s, v, acc, top, total):
    """One block of keys. s: [M, N] scores in base 2, -inf where hidden. v: [N, DV]."""
    best = tl.maximum(tl.max(s, 1), top)
    safe = tl.where(best == float("-inf"), 0.0, best)
    p = tl.exp2(s - safe[:, None])
    before = tl.exp2(top - safe)
    total = total * before + tl.sum(p, 1)
    acc = acc * before[:, None] + tl.dot(p.to(v.dtype), v)
    return acc, best, total


@triton.jit
def _verify_part_kernel(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    queries_ptr,
    begins_ptr,
    indices_ptr,
    mask_ptr,
    mask_begins_ptr,
    offsets_ptr,
    sums_ptr,
    tops_ptr,
    scale,
    q_token,
    q_head,
    kn_token,
    kn_head,
    vn_token,
    vn_head,
    out_token,
    out_head,
    k_token,
    k_head,
    v_token,
    v_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
):
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    part = tl.program_id(1)
    first = tl.load(queries_ptr + row).to(tl.int64)
    queries = (tl.load(queries_ptr + row + 1) - first).to(tl.int32)
    begin = tl.load(begins_ptr + row).to(tl.int64)
    prefix = (tl.load(begins_ptr + row + 1) - begin).to(tl.int32)
    share = tl.cdiv(tl.cdiv(prefix, BLOCK_N), PARTS) * BLOCK_N
    low = part * share
    high = tl.minimum(low + share, prefix)
    last: tl.constexpr = PARTS - 1

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    there = query < queries
    place = ((tl.program_id(0) * PARTS + part) * BLOCK_M + m).to(tl.int64)
    if (low >= high) & (part != last):
        tl.store(tops_ptr + place, tl.full([BLOCK_M], float("-inf"), tl.float32))
        return
    q = tl.load(
        q_ptr + (first + query)[:, None] * q_token + head[:, None] * q_head + d[None, :],
        mask=there[:, None] & (d < D)[None, :],
        other=0.0,
    )
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for at in range(low, high, BLOCK_N):
        key = at + n
        inside = key < high
        token = tl.load(indices_ptr + begin + key, mask=inside, other=0).to(tl.int64)
        k = tl.load(
            k_ptr + token[None, :] * k_token + kv_head * k_head + d[:, None],
            mask=inside[None, :] & (d < D)[:, None],
            other=0.0,
        )
        v = tl.load(
            v_ptr + token[:, None] * v_token + kv_head * v_head + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        s = tl.dot(q, k) * scale
        seen = there[:, None] & inside[None, :]
        if WINDOW >= 0:
            seen = seen & (prefix + query[:, None] <= key[None, :] + WINDOW)
        s = tl.where(seen, s, float("-inf"))
        acc, top, total = _block(s, v, acc, top, total)
    if part == last:
        new = tl.arange(0, BLOCK_NEW)
        inside = new < queries
        k = tl.load(
            k_new_ptr + (first + new)[None, :] * kn_token + kv_head * kn_head + d[:, None],
            mask=inside[None, :] & (d < D)[:, None],
            other=0.0,
        )
        v = tl.load(
            v_new_ptr + (first + new)[:, None] * vn_token + kv_head * vn_head + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        s = tl.dot(q, k) * scale
        seen = there[:, None] & inside[None, :]
        if MASKED:
            skipped = 0
            if WINDOW >= 0:
                skipped = tl.load(offsets_ptr + row).to(tl.int64)
            line = skipped + prefix + queries
            cell = tl.load(mask_begins_ptr + row).to(tl.int64) + query[:, None] * line
            cell = cell + skipped + prefix + new[None, :]
            seen = seen & (tl.load(mask_ptr + cell, mask=seen, other=0) != 0)
        else:
            seen = seen & (new[None, :] <= query[:, None])
        if WINDOW >= 0:
            seen = seen & (query[:, None] <= new[None, :] + WINDOW)
        s = tl.where(seen, s, float("-inf"))
        acc, top, total = _block(s, v, acc, top, total)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if PARTS == 1:
        tl.store(
            out_ptr + (first + query)[:, None] * out_token + head[:, None] * out_head + dv[None, :],
            acc,
            mask=there[:, None] & (dv < DV)[None, :],
        )
    else:
        tl.store(tops_ptr + place, top + tl.log2(total))
        tl.store(
            sums_ptr + place[:, None] * DV + dv[None, :],
            acc,
            mask=there[:, None] & (dv < DV)[None, :],
        )


@triton.jit
def _verify_whole_kernel(
    out_ptr,
    queries_ptr,
    sums_ptr,
    tops_ptr,
    out_token,
    out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    m = tl.program_id(1)
    query = m // GROUP
    first = tl.load(queries_ptr + row).to(tl.int64)
    if query >= tl.load(queries_ptr + row + 1) - first:
        return
    dv = tl.arange(0, BLOCK_DV)
    inside = dv < DV
    base = (tl.program_id(0) * PARTS).to(tl.int64) * BLOCK_M + m
    every = tl.arange(0, PARTS)
    top = tl.max(tl.load(tops_ptr + base + every * BLOCK_M), 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for at in range(0, PARTS, BLOCK_PARTS):
        part = at + tl.arange(0, BLOCK_PARTS)
        place = base + part * BLOCK_M
        weight = tl.exp2(tl.load(tops_ptr + place) - top)
        sums = tl.load(
            sums_ptr + place[:, None] * DV + dv[None, :],
            mask=(weight > 0.0)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(weight, 0)
        acc += tl.sum(sums * weight[:, None], 0)
    head = kv_head * GROUP + m % GROUP
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (first + query) * out_token + head * out_head + dv, acc, mask=inside)


def cut(head_dim: int, programs: int) -> Cut:
    """The fastest cut on a H200 for 500 and 4,000 tokens. programs: those of one part.

    ``benchmarks/verify_attention.py --tune`` tries the others.
    """
    if head_dim <= 256:
        return Cut(64, 8, 2, 264, 32) if programs < 64 else Cut(32, 4, 3, 132, 32)
    return Cut(32, 8, 3, 528, 64) if programs < 8 else Cut(32, 4, 3, 132, 32)


def ineligible(
    q: torch.Tensor, k_new: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor,
    rows: int, queries: int,
) -> str:  # fmt: skip
    """Why the kernels do not compute this verify; '' if they do. Asks for shapes only."""
    heads, kv_heads = q.shape[1], k_new.shape[1]
    if rows < 1 or q.shape[0] != rows * queries:
        return "its rows have different numbers of queries"
    if heads % kv_heads or queries * (heads // kv_heads) > MOST_QUERIES:
        return f"{queries} queries of {heads} heads on {kv_heads} are more than {MOST_QUERIES}"
    if k_buffer.dim() != 3 or k_buffer.shape[1] != kv_heads or v_buffer.shape[1] != kv_heads:
        return "its KV is not one vector for each token and head"
    if k_buffer.shape[2] != q.shape[2] or max(q.shape[2], v_buffer.shape[2]) > WIDEST:
        return f"its heads have other sizes, or more than {WIDEST}"
    if not q.dtype == k_new.dtype == k_buffer.dtype == v_buffer.dtype or q.dtype not in DTYPES:
        return "its KV has another dtype than its queries"
    return ""


def verify_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    queries: int,
    scale: float,
    window: int = -1,
    offsets: torch.Tensor | None = None,
    how: Cut | None = None,
) -> None:
    """Write the attention of a verify into ``out``. ``ineligible`` must have no objection.

    q: [rows * queries, heads, D]. k_new, v_new: [rows * queries, kv_heads, D or DV]. out: [rows *
    queries, heads, DV]. k_buffer, v_buffer: [slots, kv_heads, D or DV]. qo_indptr, kv_indptr:
    [rows + 1]. kv_indices: the slots of each row's prefix. mask: [cells], nonzero where a query
    sees a token; row r's begin at mask_indptr[r], a line of offset + prefix + queries cells for
    each query. Of the prefix it is not asked. window: how many tokens before itself a query sees,
    -1 for all. offsets: [rows], the tokens before a row's prefix that are not listed.
    """
    rows, kv_heads = qo_indptr.shape[0] - 1, k_new.shape[1]
    d, dv, group = q.shape[2], v_buffer.shape[2], q.shape[1] // k_new.shape[1]
    how = how or cut(max(d, dv), rows * kv_heads)
    block_m = max(16, triton.next_power_of_2(queries * group))
    parts = how.parts(rows * kv_heads, window)
    if parts > 1:
        places = rows * kv_heads * parts * block_m
        sums = torch.empty((places, dv), dtype=torch.float32, device=q.device)
        tops = torch.empty(places, dtype=torch.float32, device=q.device)
    else:
        sums = tops = q  # not used
    masked = mask is not None
    none = qo_indptr  # a pointer that is not read
    _verify_part_kernel[(rows * kv_heads, parts)](
        q, k_new, v_new, out, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices,
        mask if masked else none, mask_indptr if masked else none,
        none if offsets is None else offsets, sums, tops, scale * 1.4426950408889634,
        q.stride(0), q.stride(1), k_new.stride(0), k_new.stride(1), v_new.stride(0),
        v_new.stride(1), out.stride(0), out.stride(1), k_buffer.stride(0), k_buffer.stride(1),
        v_buffer.stride(0), v_buffer.stride(1),
        KV_HEADS=kv_heads, GROUP=group, WINDOW=window, MASKED=masked, PARTS=parts, D=d, DV=dv,
        BLOCK_D=triton.next_power_of_2(d), BLOCK_DV=triton.next_power_of_2(dv),
        BLOCK_M=block_m, BLOCK_N=how.keys, BLOCK_NEW=max(16, triton.next_power_of_2(queries)),
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    if parts > 1:
        _verify_whole_kernel[(rows * kv_heads, queries * group)](
            out, qo_indptr, sums, tops, out.stride(0), out.stride(1),
            KV_HEADS=kv_heads, GROUP=group, PARTS=parts, DV=dv,
            BLOCK_DV=triton.next_power_of_2(dv), BLOCK_M=block_m, BLOCK_PARTS=min(parts, 8),
            num_warps=4,
        )  # fmt: skip
