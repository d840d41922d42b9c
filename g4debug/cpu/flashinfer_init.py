"""`FlashInferAttnBackend.__init__` without FlashInfer, and the two functions used of `flashinfer`.

`TRTLLMHAAttnBackend` inherits from SGLang's FlashInfer backend. The constructor of that backend
builds CUDA wrappers and workspaces that trtllm_mha never uses. The stand-in only sets the
attributes that the subclass (of 0.5.12 to 0.5.23) reads from its parent. It computes nothing.

On 0.5.15 and 0.5.23 the CPU engine runs SGLang's FlashInfer backend itself, too, with its own
constructor and the wrappers of `flashinfer_wrappers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch

from g4debug.cpu import paged_attention

# trtllm_mha_backend gets this as the module `flashinfer`. Any other name is an AttributeError.
FLASHINFER: Final = SimpleNamespace(
    decode=SimpleNamespace(
        trtllm_batch_decode_with_kv_cache=paged_attention.trtllm_batch_decode_with_kv_cache
    ),
    prefill=SimpleNamespace(
        trtllm_batch_context_with_kv_cache=paged_attention.trtllm_batch_context_with_kv_cache
    ),
)


def init_backend(
    self: Any,
    model_runner: Any,
    skip_prefill: bool = False,
    kv_indptr_buf: Any = None,
    kv_last_page_len_buf: Any = None,
    init_new_workspace: bool = False,
) -> None:
    self.skip_prefill = skip_prefill
    self.forward_metadata = None
    self.max_context_len = model_runner.model_config.context_len  # for a draft of several steps
    # trtllm_mha reads the rest from its parent, each release more of it than the one before:
    # 0.5.12 none, 0.5.13 the pools, 0.5.14 the SWA pool that FROZEN_KV_MTP's draft reads, 0.5.18
    # how the cache is quantized, 0.5.21 the translator.
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    self.req_to_token_pool = model_runner.req_to_token_pool
    self.token_to_kv_pool = getattr(model_runner, "token_to_kv_pool", None)
    self.use_sliding_window_kv_pool = isinstance(self.token_to_kv_pool, SWAKVPool)
    if hasattr(FlashInferAttnBackend, "_resolve_swa_kv_pool"):  # 0.5.13 has it in trtllm_mha
        self._swa_kv_pool = self._resolve_swa_kv_pool(model_runner)
        self.use_sliding_window_kv_pool = self._swa_kv_pool is not None
    if hasattr(model_runner, "kv_index_translator"):
        self.kv_index_translator = model_runner.kv_index_translator
    if hasattr(self.token_to_kv_pool, "get_kv_cache_quant_method"):
        self.kv_cache_quant_method = self.token_to_kv_pool.get_kv_cache_quant_method()


def of_subclasses(own: Callable[..., None]) -> Callable[..., None]:
    """In place of the constructor: SGLang's own for that class, and else :func:`init_backend`."""

    @functools.wraps(own)
    def init(self: Any, *args: Any, **options: Any) -> None:
        is_its_own = type(self).__name__ == "FlashInferAttnBackend"
        (own if is_its_own else init_backend)(self, *args, **options)

    return init


def no_counter_buffer(device: torch.device, num_q_heads: int, max_batch_size: int) -> torch.Tensor:
    """The scratch memory in which the CUDA kernel counts its blocks: none, `[0]` uint8."""
    return torch.zeros(0, dtype=torch.uint8, device=device)
