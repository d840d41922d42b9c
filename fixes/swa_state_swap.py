"""Lets the SWA state of the draft's backend follow the KV pool that is really read.

The draft of FROZEN_KV_MTP has a dummy pool of 64 tokens and reads the target's pool through two
views (``_frozen_kv_target_view`` for the metadata, ``_target_kv_pool_view`` for the forward). A
trtllm_mha backend that decided once, from the dummy pool, that it has no SWA pool
(``use_sliding_window_kv_pool=False, _swa_kv_pool=None``) then gives page numbers of the *full* pool
to the sliding layers. Their pool is smaller, so this is an illegal memory access.

With the fix, the two attributes describe the pool that the view shows, inside of both views.
They are put back afterwards, also after an exception. The same is done with the mapping from full
to SWA slots, which the backend keeps for its graphs from 0.5.14 on. What the CUDA graphs use later
(the SWA page-table buffer, and more from 0.5.13 on) is allocated as the *target's* pool needs it.
The draft's graphs are captured and replayed inside the same views, so nothing more is needed for
them.

From seed PR #6; upstream sglang #26966 and #27491. SGLang from 0.5.13 on finds the right pool by
itself; there the fix is for the demo's fault, which puts the old state back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix, after, around
from g4debug.fixes.source import exists, source

if TYPE_CHECKING:
    import torch

BACKEND = "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"


def backends_of(backend: Any) -> tuple[Any, ...]:
    """``backend`` and the backends inside it (of a HybridAttnBackend) that keep SWA state."""
    found = []
    for candidate in (
        backend,
        getattr(backend, "prefill_backend", None),
        getattr(backend, "decode_backend", None),
    ):
        if hasattr(candidate, "_swa_kv_pool"):
            found.append(candidate)
    return tuple(found)


@contextmanager
def swa_state_of(backend: Any, pool: Any) -> Iterator[None]:
    """Give ``backend`` the SWA state that belongs to ``pool``, for a while.

    The state from before is put back at the end, also after an exception. It may be nested.
    """
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    is_swa = isinstance(pool, SWAKVPool)
    state = {
        "use_sliding_window_kv_pool": is_swa,
        "_swa_kv_pool": pool if is_swa else None,
        "_swa_full_to_swa_mapping": pool.full_to_swa_index_mapping if is_swa else None,
    }
    saved = [
        (b, name, getattr(b, name))
        for b in backends_of(backend)
        for name in state
        if hasattr(b, name)
    ]
    try:
        for b, name, _ in saved:
            setattr(b, name, state[name])
        yield
    finally:
        for b, name, value in saved:
            setattr(b, name, value)


def around_view(
    call_next: Callable[..., Any], worker: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``_frozen_kv_target_view`` and ``_target_kv_pool_view`` of the draft's worker.

    Both return a context manager. Ours is entered inside of it.
    """
    view = call_next(worker, forward_batch, *args, **kwargs)

    @contextmanager
    def with_swa_state() -> Iterator[Any]:
        # The worker captures graphs in __init__, before it has set draft_attn_backend.
        backend = getattr(worker, "draft_attn_backend", None) or forward_batch.attn_backend
        with view as value, swa_state_of(backend, worker.kv_context.target_token_to_kv_pool):
            yield value

    return with_swa_state()


def around_alloc_swa_page_table(
    call_next: Callable[..., Any], backend: Any, max_bs: int, max_num_pages: int
) -> torch.Tensor | None:
    """Allocate the SWA page-table buffer if the *target* has a SWA pool.

    Returns zeros, int32 [max_bs, max_num_pages], or None for a model without SWA.
    """
    import torch

    buffer: torch.Tensor | None = call_next(backend, max_bs, max_num_pages)
    if buffer is None and getattr(backend, "_g4debug_target_is_swa", False):
        buffer = torch.zeros(max_bs, max_num_pages, dtype=torch.int32, device=backend.device)
    return buffer


def around_init_graph_state(
    call_next: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any
) -> Any:
    """Allocate the buffers that the graphs use inside the views (0.5.13: not only the page table).

    SGLang calls this outside of the views, when the draft's backend knows only its dummy pool.
    """
    if not getattr(backend, "_g4debug_target_is_swa", False):
        return call_next(backend, *args, **kwargs)
    with swa_state_of(backend, backend._g4debug_target_pool):
        return call_next(backend, *args, **kwargs)


def after_init(result: Any, backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Remember whether the allocator has a SWA pool. A draft has the target's allocator."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    kv_pool = getattr(model_runner.token_to_kv_pool_allocator, "get_kvcache", lambda: None)()
    backend._g4debug_target_pool = kv_pool
    backend._g4debug_target_is_swa = isinstance(kv_pool, SWAKVPool)
    return result


def still_broken() -> bool:
    """True if the backend decides once, in ``__init__``, from the pool of its own runner."""
    init = source(f"{BACKEND}.__init__")
    decides = "use_sliding_window_kv_pool" in init
    asks_allocator = "token_to_kv_pool_allocator" in init
    resolves = exists(f"{BACKEND}._resolve_swa_kv_pool")
    return decides and not asks_allocator and not resolves


FIX = Fix(
    id="swa-state-swap",
    title="the SWA state of the draft's attention backend follows the pool that is really read",
    seed="PR #6",
    upstream="sglang #26966 (2026-06-02), made more general by #27491",
    needs=">=0.5.12",
    still_broken=still_broken,
    hooks=(
        around("worker.frozen_view", around_view),
        around("worker.pool_view", around_view),
        around("attn.trtllm_mha.alloc_swa_page_table", around_alloc_swa_page_table),
        around("attn.trtllm_mha.init_graph_state", around_init_graph_state),
        after("attn.trtllm_mha.init", after_init),
    ),
    purpose="correctness",
)
