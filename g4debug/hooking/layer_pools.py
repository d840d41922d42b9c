"""Which KV pool a layer reads in a forward, and how many pages that pool has.

SGLang keeps a forward's pool in another place from release to release, as it moves its methods:
:mod:`g4debug.hooking.targets`.
"""

from __future__ import annotations

from typing import Any


def target_pool(backend: Any, batch: Any) -> Any:
    """The KV pool of this forward: on the ForwardBatch up to 0.5.12, on the backend after it."""
    pool = getattr(batch, "token_to_kv_pool", None)
    return backend.token_to_kv_pool if pool is None else pool


def pool_of_layer(backend: Any, layer: Any, forward_batch: Any) -> tuple[Any, str]:
    """The inner KV pool that ``layer`` reads in this forward, and its name (full or swa)."""
    pool = target_pool(backend, forward_batch)
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is None:
        return pool, "full"
    is_swa = mapping[layer.layer_id][1]
    return (pool.swa_kv_pool, "swa") if is_swa else (pool.full_kv_pool, "full")


def pages_of(pool: Any, layer: Any, page_size: int) -> int:
    """Number of valid page indices: rows of the K buffer over the page size."""
    buffers = getattr(pool, "k_buffer", None)
    if buffers:
        return int(buffers[0].shape[0]) // int(page_size)
    return int(pool.get_key_buffer(layer.layer_id).shape[0]) // int(page_size)
