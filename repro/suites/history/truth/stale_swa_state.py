"""Counts the page tables that the draft's sliding layers get, and the wrong ones among them.

The upstream fix (#26966; 0.5.23, ``TRTLLMHAAttnBackend._resolve_swa_kv_pool``) asks the allocator
which pool FROZEN_KV_MTP's draft really reads. Without it the backend has no SWA page table, and
``_get_layer_page_table`` gives every layer the table of the full pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.history.counter import Counter, around


def install(counter: Counter) -> None:
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    drafts: dict[int, Any] = {}

    @around(TRTLLMHAAttnBackend, "__init__")
    def init(backend: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        pool = runner.token_to_kv_pool_allocator.get_kvcache()
        if runner.is_draft_worker and isinstance(pool, SWAKVPool):
            drafts[id(backend)] = pool

    @around(TRTLLMHAAttnBackend, "_get_layer_page_table")
    def table(backend: Any, layer: Any, *args: Any) -> Callable[[Any], None] | None:
        pool = drafts.get(id(backend))
        if pool is None or not pool.layers_mapping[layer.layer_id][1]:
            return None
        counter.reached()

        def given(result: Any) -> None:
            if result is not backend.forward_metadata.swa_page_table:
                counter.triggered(f"sliding layer {layer.layer_id} reads by the full pool's table")

        return given
