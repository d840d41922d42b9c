"""`FlashInferAttnBackend.__init__` without FlashInfer, and the two functions used of `flashinfer`.

`TRTLLMHAAttnBackend` inherits from SGLang's FlashInfer backend, whose constructor builds CUDA
wrappers and workspaces that trtllm_mha never uses. The stand-in only sets the attributes that the
subclass (of 0.5.12 and 0.5.13) reads from its parent. It computes nothing and makes no tensors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

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
    # 0.5.13's trtllm_mha reads these three from its parent; 0.5.12's does not, or sets its own.
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    self.req_to_token_pool = model_runner.req_to_token_pool
    self.token_to_kv_pool = getattr(model_runner, "token_to_kv_pool", None)
    self.use_sliding_window_kv_pool = isinstance(self.token_to_kv_pool, SWAKVPool)
