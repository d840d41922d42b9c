"""FlashInfer's wrappers, with which SGLang's backends `flashinfer` and `flashinfer_mla` attend.

A wrapper is told what a forward reads (`begin_forward`, `plan`), and then attends for each layer
(`forward`, `run`). Row b reads the KV of ``indices[indptr[b] : indptr[b + 1]]``, which are rows of
the KV buffers, because SGLang hands over pages of one token. Its queries begin at ``qo_indptr[b]``.
They are the last ones of the row if ``causal``; else each sees every key::

    query i of n sees key j of p    if j <= p - n + i             (causal)
                                    if j >= p - n + i - window    (with a window)
                                    if the mask says so, which takes the place of causal

With s = sm_scale * <q, k>, capped by ``cap * tanh(s / cap)``, the output is ``softmax(s) V``, and
the log-sum-exp of a query is that of its s, to the base of 2. Two parts of a row's keys are merged
by them (`merge`). In `flashinfer_mla` Q and the cache have two parts, of which the first is V's.

A window counts only if it was given when a forward was planned: FlashInfer compiles its kernels
for that (its prefill.py, ``use_sliding_window``), and a window that `forward` is told of does
nothing in the others. SGLang plans with one where all of a prefill is read from pages.

What SGLang reads back of a wrapper has FlashInfer's names: ``_paged_kv_indptr_buf`` and
``_paged_kv_indices_buf``, of MLA ``_kv_indptr_buf`` and ``_kv_indices_buf``. There are no CUDA
graphs here. Whatever no toy model uses is refused. An index outside of the buffer is a device fault
and not an exception (see `fault`), and the output of that row is zeros.

Shapes: q ``[tokens, q_heads, dim]``; buffers ``[slots, kv_heads, dim]``; all integers are int32.
Source: flashinfer 0.7.2, which needs a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from g4debug.cpu.module_but import ModuleBut
from g4debug.cpu.paged_attention import refuse
from g4debug.cpu.token_attention import slots_of

# Options of a plan that only say how a GPU computes it.
HOW = ("q_data_type", "kv_data_type", "data_type", "non_blocking", "disable_split_kv")


class _Wrapper:
    """What the wrappers have in common. options: of the constructor, which are for a GPU."""

    is_cuda_graph_enabled = False
    _custom_mask_buf = None

    def __init__(self, workspace: torch.Tensor, layout: str = "NHD", **options: Any) -> None:
        given = {k: v for k, v in options.items() if k not in ("backend", "use_tensor_cores")}
        refuse(type(self).__name__, {**given, "layout": None if layout == "NHD" else layout})
        self._window = -1
        self._mask: torch.Tensor | None = None

    def _plan_options(self, page_size: int, last: torch.Tensor, options: dict[str, Any]) -> None:
        refuse(
            f"{type(self).__name__}.begin_forward",
            {
                **{k: v or None for k, v in options.items() if k not in HOW},
                "page_size": None if page_size == 1 else page_size,
                "pages that are not full": bool((last != 1).any()),
            },
        )


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query for each row, which sees all keys of its list."""

    def begin_forward(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self._plan_options(page_size, last_page_len, options)
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices

    def forward(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], **options: Any
    ) -> torch.Tensor:
        """options: sm_scale, logits_soft_cap."""
        rows = self._paged_kv_indptr_buf.shape[0]
        out, _ = _attend(
            "BatchDecodeWithPagedKVCacheWrapper", q, kv, torch.arange(rows),
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf, False, -1, None, options,
        )  # fmt: skip
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """As many queries of each row as ``qo_indptr`` says, and its keys from the cache."""

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        custom_mask: torch.Tensor | None = None,
        window_left: int = -1,
        **options: Any,
    ) -> None:
        """custom_mask: for each row one line for each query, of as many cells as it has keys."""
        self._plan_options(page_size, last_page_len, options)
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
        self._qo_indptr_buf, self._mask, self._window = qo_indptr, custom_mask, window_left

    def forward(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], **options: Any
    ) -> torch.Tensor:
        return self.forward_return_lse(q, kv, **options)[0]

    def forward_return_lse(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        causal: bool = True,
        window_left: int = -1,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, log-sum-exp ``[tokens, q_heads]``)."""
        return _attend(
            "BatchPrefillWithPagedKVCacheWrapper", q, kv, self._qo_indptr_buf,
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf, causal,
            min(self._window, window_left), self._mask, options,
        )  # fmt: skip


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """The keys are those of the batch itself: row b's are ``k[indptr[b] : indptr[b + 1]]``."""

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int = 0,
        head_dim_qk: int = 0,
        head_dim_vo: int = 0,
        causal: bool = False,
        **options: Any,
    ) -> None:
        self._plan_options(1, qo_indptr.new_ones(1), options)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return self.forward_return_lse(q, k, v, **options)[0]

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = True,
        window_left: int = -1,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, log-sum-exp ``[tokens, q_heads]``)."""
        return _attend(
            "BatchPrefillWithRaggedKVCacheWrapper", q, (k, v), self._qo_indptr_buf,
            self._kv_indptr_buf, torch.arange(len(k)), causal, -1, None, options,
        )  # fmt: skip


class BatchMLAPagedAttentionWrapper:
    """Absorbed MLA: one vector of the cache is key and, in its first part, value of all heads."""

    is_cuda_graph_enabled = False

    def __init__(self, workspace: torch.Tensor, **options: Any) -> None:
        refuse(
            "BatchMLAPagedAttentionWrapper", {k: v for k, v in options.items() if k != "backend"}
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """kv_len_arr: the tokens of each row, which must be those that it lists."""
        if page_size != 1 or kv_len_arr.tolist() != kv_indptr.diff().tolist():
            raise ValueError(
                f"BatchMLAPagedAttentionWrapper.plan: got pages of {page_size} and the lengths "
                f"{kv_len_arr.tolist()} for lists that begin at {kv_indptr.tolist()}, expected "
                "pages of one token and the lengths of the lists: extend the stand-ins in "
                "g4debug/cpu."
            )
        self._qo_indptr_buf, self._kv_len_arr_buf = qo_indptr, kv_len_arr
        self._kv_indptr_buf, self._kv_indices_buf = kv_indptr, kv_indices
        self._causal, self._scale = causal, sm_scale

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        out: torch.Tensor,
        return_lse: bool = False,
    ) -> torch.Tensor:
        """Writes ``[tokens, heads, dim of ckv]`` into ``out`` and returns it."""
        refuse("BatchMLAPagedAttentionWrapper.run", {"return_lse": return_lse})
        found, _ = _attend(
            "BatchMLAPagedAttentionWrapper", torch.cat((q_nope, q_pe), -1),
            (torch.cat((ckv, kpe), -1), ckv), self._qo_indptr_buf, self._kv_indptr_buf,
            self._kv_indices_buf, self._causal, -1, None, {"sm_scale": self._scale},
        )  # fmt: skip
        return out.copy_(found)


def merge(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two parts of the keys, from that over each: (output, log-sum-exp)."""
    both = torch.logaddexp2(s_a, s_b)
    a, b = (torch.exp2(s - both).nan_to_num(0.0)[..., None] for s in (s_a, s_b))
    return (v_a.float() * a + v_b.float() * b).to(v_a.dtype), both


class _Torch(ModuleBut):
    """The module torch, except that `empty` takes SGLang's device "cuda" for the CPU."""

    @staticmethod
    def empty(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.empty(*size, device="cpu" if device == "cuda" else device, **options)

    @staticmethod
    def zeros(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        """Memory can be pinned only where there is an accelerator."""
        return torch.zeros(*size, **options)


TORCH = _Torch(torch)


def no_fast_plan(*args: Any, **options: Any) -> None:
    """In place of ``fast_decode_plan``, by which SGLang knows a wrapper of a CUDA graph."""
    raise NotImplementedError(
        "the CPU engine has no CUDA graphs, so fast_decode_plan is never called; SGLang called it: "
        "extend g4debug/cpu/flashinfer_wrappers.py."
    )


def _attend(
    kernel: str,
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    causal: bool,
    window: int,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output ``[tokens, q_heads, dim of V]``, log-sum-exp ``[tokens, q_heads]``)."""
    scale, cap = options.pop("sm_scale"), options.pop("logits_soft_cap", None) or 0.0
    refuse(kernel, options)
    keys, values = kv
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros((*q.shape[:2], values.shape[-1]), dtype=q.dtype)
    lse = torch.full(q.shape[:2], float("-inf"))
    begins, bounds, at = qo_indptr.tolist(), indptr.tolist(), 0
    for b in range(len(bounds) - 1):
        first, end = begins[b], begins[b + 1]
        slots = slots_of(kernel, indices, bounds, b, keys)
        n, cells = end - first, (end - first) * (bounds[b + 1] - bounds[b])
        seen = _seen(n, bounds[b + 1] - bounds[b], causal and mask is None, window)
        if mask is not None:
            seen &= mask[at : at + cells].view(n, -1).bool() if cells else seen
            at += cells
        if n <= 0 or slots is None or not len(slots):
            continue
        query = q[first:end].float().view(n, keys.shape[1], group, -1).permute(1, 2, 0, 3)
        scores = query @ keys[slots].float().permute(1, 2, 0)[:, None] * scale
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen, float("-inf"))  # [kv_heads, group, n, keys]
        weights = scores.softmax(-1).nan_to_num(0.0)
        found = weights @ values[slots].float().transpose(0, 1)[:, None]
        out[first:end] = found.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
        lse[first:end] = (scores.logsumexp(-1) / math.log(2)).permute(2, 0, 1).flatten(1)
    return out, lse


def _seen(queries: int, keys: int, causal: bool, window: int) -> torch.Tensor:
    """Which keys each query sees, bool ``[queries, keys]``."""
    position = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)[None]
    seen = torch.ones(max(queries, 0), keys, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window >= 0:
        seen &= key >= position - window
    return seen
