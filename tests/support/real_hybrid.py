"""SGLang's own HybridAttnBackend around two backends that have a KV pool and compute nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import releases

from g4debug.fixes import hybrid_pool_swap


def unpatched(monkeypatch: Any) -> Any:
    """The class; what the fix puts on it is taken off after the test."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    monkeypatch.setattr(HybridAttnBackend, "token_to_kv_pool", None, raising=False)
    monkeypatch.delattr(HybridAttnBackend, "token_to_kv_pool")
    return HybridAttnBackend


def with_pool(pool: Any) -> SimpleNamespace:
    return SimpleNamespace(token_to_kv_pool=pool, needs_cpu_seq_lens=False)


def build(
    hybrid_class: Any, pool: Any, prefill: Any, decode: Any, fixed: bool, **runner: Any
) -> Any:
    """pool: the runner's own. runner: what it has besides. fixed: fix hybrid-pool-swap is on."""
    own = SimpleNamespace(
        kv_cache_dtype=None,
        token_to_kv_pool=pool,
        req_to_token_pool=None,
        server_args=SimpleNamespace(speculative_attention_mode="prefill"),
        kv_index_translator=None,
        model_config=SimpleNamespace(context_len=64),
        **runner,
    )
    releases.configure(speculative_attention_mode="prefill")
    backend = hybrid_class(own, prefill, decode)
    if not hasattr(backend, "token_to_kv_pool"):
        backend.token_to_kv_pool = pool  # 0.5.12 keeps the pool on the ForwardBatch
    if fixed:
        hybrid_pool_swap.after_init(None, backend, own, prefill, decode)
    return backend
