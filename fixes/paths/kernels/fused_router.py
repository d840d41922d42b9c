"""Gemma-4's choice of experts in one launch: top-k, softmax, a scale for each expert, casts.

For each row of logits l, where t are the ids of its K greatest logits::

    weights[j] = exp(l[t_j] - max) / sum_i exp(l[t_i] - max) * scale[t_j]      float32
    ids[j]     = t_j                                                            int32

(The softmax over all experts, renormalised over the chosen ones, is the softmax over the chosen.)

The order is descending. NaN is above +inf, as in torch, +0 is above -0, and equal logits are in the
order of their ids. ``torch.topk`` promises no order among equal logits. On CUDA it takes the lowest
ids of those that are equal at the last place, so there the chosen *set* is the same. If a NaN or
+inf is chosen, or if all logits are -inf, all weights of the row are NaN, as with softmax.

All is computed in float32 after the load. SGLang's torch code rounds the softmax and the product to
the logits' dtype.

A logit is turned into an integer with the same order. A logit of 16 bits shares one word with the
complement of its expert's id. So one integer maximum over the row, which is one instruction of a
warp, finds the value and the id at once, and K such maxima are cheaper than sorting E logits. A
logit of 32 bits takes two maxima.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from g4debug.fixes.paths.kernels._rows import DTYPES, Tile, for_graphs, in_turn, options

MAX_EXPERTS = 1024  # a row is held in registers
UNROLL = 16  # rounds that are unrolled


@triton.jit
def _take(key, order, picked, picked_id, e, j, i, WIDE: tl.constexpr):
    """One round: the greatest logit that is left goes to column i. e: experts, j: columns."""
    LEAST: tl.constexpr = -2147483648
    if WIDE:
        best = tl.max(order, axis=1)[:, None]
        first = tl.min(tl.where(order == best, e, 2147483647), axis=1)[:, None]
        picked = tl.where(j == i, best, picked)
        picked_id = tl.where(j == i, first, picked_id)
        order = tl.where(e == first, LEAST, order)
    else:
        best = tl.max(key, axis=1)[:, None]
        picked = tl.where(j == i, best, picked)
        key = tl.where(key == best, LEAST, key)
    return key, order, picked, picked_id


@triton.jit(do_not_specialize=["rows"])  # one binary for all batch sizes
def _fused_router_kernel(
    logits_ptr,
    scale_ptr,
    weights_ptr,
    ids_ptr,
    rows,
    stride,
    E: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PICKED: tl.constexpr,
    PDL: tl.constexpr,
):
    in_turn(PDL)
    LEAST: tl.constexpr = -2147483648
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    e = tl.arange(0, BLOCK)[None, :]
    inside = row < rows
    x = tl.load(logits_ptr + row * stride + e, mask=inside & (e < E), other=0.0)
    wide = x.to(tl.float32)
    nan = wide != wide
    j = tl.arange(0, PICKED)[None, :]
    picked = tl.zeros([ROWS, PICKED], tl.int32)
    picked_id = tl.zeros([ROWS, PICKED], tl.int32)
    if WIDE:
        bits = x.to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        order = tl.where(e < E, tl.where(nan, 0x7FFFFFFF, order), LEAST)
        key = order
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        order = bits ^ ((bits >> 15) & 0x7FFF)
        order = tl.where(nan, 0x7FFF, order)
        key = tl.where(e < E, (order << 16) | (0xFFFF - e), LEAST)
    if UNROLLED:
        for i in tl.static_range(K):
            key, order, picked, picked_id = _take(key, order, picked, picked_id, e, j, i, WIDE)
    else:
        for i in range(K):
            key, order, picked, picked_id = _take(key, order, picked, picked_id, e, j, i, WIDE)
    if WIDE:
        back = picked ^ ((picked >> 31) & 0x7FFFFFFF)
        value = back.to(tl.float32, bitcast=True)
    else:
        picked_id = 0xFFFF - (picked & 0xFFFF)
        half = picked >> 16
        half = half ^ ((half >> 15) & 0x7FFF)
        value = half.to(tl.int16).to(logits_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    chosen = j < K
    top = tl.max(tl.where(chosen, value, float("-inf")), axis=1)[:, None]
    p = tl.where(chosen, tl.exp(value - top), 0.0)
    p = p / tl.sum(p, axis=1)[:, None]
    out = inside & chosen
    scale = tl.load(scale_ptr + picked_id, mask=out, other=0.0).to(tl.float32)
    tl.store(weights_ptr + row * K + j, p * scale, mask=out)
    tl.store(ids_ptr + row * K + j, picked_id, mask=out)


def tile(rows: int, experts: int) -> Tile:
    """The fastest tile on a H200 for 128 experts.

    ``benchmarks/fused_router.py --tune`` tries the others.
    """
    if experts > 256:
        return Tile(1, 4, pdl=True)
    if rows <= 128:
        return Tile(1, 1, pdl=True)
    return Tile(4, 4, pdl=True) if rows <= 2048 else Tile(4, 1, pdl=True)


def fused_router(
    logits: torch.Tensor, scale: torch.Tensor, top_k: int, how: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, float32 [rows, top_k], and ids, int32 [rows, top_k], of each row's experts.

    logits: float16, bfloat16 or float32 [rows, experts], with adjacent columns and any row stride.
    scale: [experts], any float dtype. Raises ValueError for other shapes and dtypes, for more than
    MAX_EXPERTS experts, and unless 1 <= top_k <= experts.
    """
    why = ineligible(logits, scale, top_k)
    if why:
        raise ValueError(f"fused_router: {why}; use reference()")
    rows, experts = logits.shape
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    if rows == 0:
        return weights, ids
    how = how or tile(rows, experts)
    _fused_router_kernel[(triton.cdiv(rows, how.rows),)](
        logits,
        scale,
        weights,
        ids,
        rows,
        logits.stride(0),
        E=experts,
        K=top_k,
        WIDE=logits.dtype == torch.float32,
        UNROLLED=top_k <= UNROLL,
        ROWS=how.rows,
        BLOCK=triton.next_power_of_2(experts),
        PICKED=max(32, triton.next_power_of_2(top_k)),  # one choice for each lane of a warp
        **options(how, logits.device),
    )
    return weights, ids


def ineligible(logits: torch.Tensor, scale: torch.Tensor, top_k: int) -> str:
    """Why the kernel does not take these ("got ..., expected ..."); '' if it does."""
    if logits.dim() != 2 or logits.dtype not in DTYPES or logits.stride(1) != 1:
        return (
            f"got logits {tuple(logits.shape)} of {logits.dtype} with strides {logits.stride()}, "
            "expected two dimensions, float16, bfloat16 or float32, adjacent columns"
        )
    experts = logits.shape[1]
    if experts > MAX_EXPERTS or not 1 <= top_k <= experts:
        return (
            f"got top {top_k} of {experts} experts, expected 1 <= top_k <= experts <= {MAX_EXPERTS}"
        )
    if scale.shape != (experts,) or scale.stride(0) != 1:
        return f"got a scale of shape {tuple(scale.shape)}, expected ({experts},), contiguous"
    return ""


def reference(
    logits: torch.Tensor, scale: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same computation in torch, with the same order, for any number of experts."""
    wide = logits.float()
    bits = wide.view(torch.int32)
    order = torch.where(wide.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    ids = order.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.gather(1, ids).softmax(-1) * scale.float()[ids]
    return weights, ids.to(torch.int32)


fused_router_op = for_graphs(
    fused_router,
    "(Tensor logits, Tensor scale, int top_k) -> (Tensor, Tensor)",
    lambda logits, scale, top_k: (
        logits.new_empty((logits.shape[0], top_k), dtype=torch.float32),
        logits.new_empty((logits.shape[0], top_k), dtype=torch.int32),
    ),
)
