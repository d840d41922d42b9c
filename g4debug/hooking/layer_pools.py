"""Which KV pool a layer reads in a forward, and how many pages that pool has.

Where SGLang keeps the pool of a forward differs between releases, as the places of its functions
do (:mod:`g4debug.hooking.targets`).
"""

from __future__ import annotations

from typing import Any

from g4debug.hooking.kv_buffers import buffers_of


def target_pool(backend: Any, batch: Any) -> Any:
    """The KV pool of this forward. Up to 0.5.12 the ForwardBatch has it, later the backend."""
    pool = getattr(batch, "token_to_kv_pool", None)
    return backend.token_to_kv_pool if pool is None else pool


def pool_of_layer(backend: Any, layer: Any, forward_batch: Any) -> tuple[Any, str]:
    """The inner KV pool that ``layer`` reads in this forward, and its name (full or swa)."""
    pool = target_pool(backend, forward_batch)
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is None:
        return attention_pool(pool), "full"
    is_swa = mapping[layer.layer_id][1]
    return (pool.swa_kv_pool, "swa") if is_swa else (pool.full_kv_pool, "full")


def attention_pool(pool: Any) -> Any:
    """The pool of the layers with attention. A HybridLinearKVPool has the states of others, too."""
    return getattr(pool, "full_kv_pool", pool)


def request_table(backend: Any, holder: Any) -> Any:
    """SGLang's ``req_to_token``, int32 [requests, tokens].

    holder: has the pool of the rows where the backend has neither; a ForwardBatch up to 0.5.12, or
    a ModelRunner.
    """
    own = getattr(backend, "req_to_token", None)
    if own is not None:
        return own
    pool = getattr(backend, "req_to_token_pool", None)
    return (holder.req_to_token_pool if pool is None else pool).req_to_token


def pages_of(pool: Any, layer: Any, page_size: int) -> int:
    """The number of valid page indices: the rows of a layer's buffer divided by the page size."""
    for layers in filter(None, buffers_of(pool).values()):
        return int(layers[0].shape[0]) // int(page_size)
    return int(pool.get_key_buffer(layer.layer_id).shape[0]) // int(page_size)
