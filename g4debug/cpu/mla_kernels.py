"""The attention kernels of SGLang's backends `flashmla` and `trtllm_mla`.

A decode of absorbed MLA is the attention of `paged_attention` with one KV head: one vector of the
cache is the key of all heads and, in its first part, their value. FlashMLA's cache is
``[pages, 64, 1, dim]`` and TensorRT-LLM's ``[pages, 1, page, dim]``; Q is
``[rows, queries, heads, dim]``, and a row's queries are its last tokens. The output is
``[rows, queries, heads, dim of V]``.

A prefill attends over K and V that are handed over (`trtllm_ragged_attention_deepseek`). Its
log-sum-exp is to the base of e, because SGLang merges it with one of the same base.

Whatever no toy model uses is refused. The kernels are in `flash_mla` and `flashinfer`, wheels for
CUDA only. What plans the work of a GPU's blocks has no effect on the result, so it is empty.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Final

import torch

from g4debug.cpu.flashinfer_wrappers import BatchPrefillWithRaggedKVCacheWrapper
from g4debug.cpu.paged_attention import attend, refuse

# Options that only say how a GPU computes it, or that repeat the shapes.
HOW = (
    "workspace_buffer",
    "enable_pdl",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "max_seq_len",
    "max_q_len",
    "max_kv_len",
    "batch_size",
    "multi_ctas_kv_counter_buffer",
    "tile_scheduler_metadata",
    "use_legacy",
)
PAGE = 64  # tokens of a page, for which FlashMLA's kernel is built


def plan_nothing(
    cache_seqlens: torch.Tensor, *args: object, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """`get_mla_decoding_metadata` of FlashMLA: a plan for one block, `[1, 8]` and `[rows + 1]`."""
    rows = cache_seqlens.shape[0]
    return torch.zeros(1, 8, dtype=torch.int32), torch.zeros(rows + 1, dtype=torch.int32)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp): SGLang reads the latter with context parallelism only. It is NaN."""
    wrong = {
        "causal=False": not causal,
        "pages of another size": k_cache.shape[1] != PAGE,
        "several KV heads": k_cache.shape[2] != 1,
    }
    _refuse("flash_mla_with_kvcache", options | wrong)
    cache = k_cache.transpose(1, 2)
    out = _attend(
        "flash_mla_with_kvcache", q, cache, head_dim_v, block_table, cache_seqlens, softmax_scale
    )
    return out, torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    **options: object,
) -> torch.Tensor:
    name = "trtllm_batch_decode_with_kv_cache_mla"
    _refuse(name, options | {"several KV heads": kv_cache.shape[1] != 1})
    return _attend(name, query, kv_cache, kv_lora_rank, block_tables, seq_lens, bmm1_scale)


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bmm1_scale: float,
    bmm2_scale: float,
    o_sf_scale: float,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    seq_lens: torch.Tensor,
    is_causal: bool,
    return_lse: bool,
    out: torch.Tensor,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Writes ``[tokens, heads, dim of V]`` into ``out``, and returns it; see the module for lse.

    o_sf_scale: of an output in FP4 only. seq_lens: how many keys each row has.
    """
    name = "trtllm_ragged_attention_deepseek"
    counts = cum_seq_lens_kv.diff().tolist()
    wrong = {
        "a window": window_left != -1,
        "bmm2_scale": None if bmm2_scale == 1.0 else bmm2_scale,
        "lengths that differ from those of the lists": seq_lens.tolist() != counts,
    }
    _refuse(name, options | wrong)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(query)
    heads = query.shape[1], key.shape[1]
    wrapper.begin_forward(cum_seq_lens_q, cum_seq_lens_kv, *heads)
    found, lse = wrapper.forward_return_lse(
        query, key, value, causal=is_causal, sm_scale=float(bmm1_scale)
    )
    out.copy_(found)
    return (out, lse * math.log(2)) if return_lse else out


def fixup_zero_kv_rows(
    out: torch.Tensor,
    lse: torch.Tensor,
    kv_lens: torch.Tensor,
    cum_seq_lens: torch.Tensor,
    max_seq_len: int,
) -> None:
    """Rows without keys give nothing: 0, with a log-sum-exp of -inf."""
    starts = cum_seq_lens.tolist()
    for row, tokens in enumerate(kv_lens.tolist()):
        if tokens == 0:
            out[starts[row] : starts[row + 1]] = 0
            lse[starts[row] : starts[row + 1]] = -math.inf


# trtllm_mla_backend gets this as the module `flashinfer`. Any other name is an AttributeError.
FLASHINFER: Final = SimpleNamespace(
    decode=SimpleNamespace(
        trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla
    ),
    prefill=SimpleNamespace(trtllm_ragged_attention_deepseek=trtllm_ragged_attention_deepseek),
)


def no_module(dtype: torch.dtype) -> None:
    """SGLang compiles the kernel of :func:`fixup_zero_kv_rows` when the backend is built."""


def _refuse(kernel: str, options: dict[str, object]) -> None:
    refuse(kernel, {name: value for name, value in options.items() if name not in HOW})


def _attend(
    kernel: str,
    query: torch.Tensor,
    cache: torch.Tensor,
    value_dim: int,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """cache: ``[pages, 1, page, dim]``."""
    rows, queries = query.shape[:2]
    starts = [queries * row for row in range(rows + 1)]
    out = attend(
        kernel, query.flatten(0, 1), (cache, cache[..., :value_dim]), table, lengths, starts,
        float(scale), 1.0, -1, None, None,
    )  # fmt: skip
    return out.view(rows, queries, *out.shape[1:])
