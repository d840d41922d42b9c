"""Shared by the faults of KV data: the pools with their buffers, and which pages are live.

These faults act before a decode step runs, on the tensors that the attention kernels will read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug import speculation
from g4debug.faults._allocator import part
from g4debug.faults._spec import asks_for
from g4debug.faults.base import Injection
from g4debug.faults.grammar import Action
from g4debug.hooking import req_kv
from g4debug.hooking.kv_buffers import buffers_of
from g4debug.hooking.layer_pools import attention_pool

if TYPE_CHECKING:
    import torch

POOLS = ("full", "swa")
TASKS = {
    "on": "do it in a pool that is drawn at random",
    "full": "do it in the full pool",
    "swa": "do it in the SWA pool",
}

# A draft with KV of its own has it in the pages of one of these.
SPOILS = {**TASKS, "draft": "do it in the pool of a draft that has one"}


def pools_of(allocator: Any) -> tuple[str, ...]:
    return POOLS if hasattr(allocator, "swa_attn_allocator") else ("full",)


def layer_id(allocator: Any, pool: str, index: int) -> int:
    """The number that layer ``index`` of a pool has in the model."""
    kvcache = allocator.get_kvcache()
    mapping = getattr(kvcache, "layers_mapping", None)
    attending = getattr(kvcache, "full_attention_layer_id_mapping", None)
    if attending is not None:
        return next(int(n) for n, i in attending.items() if i == index)
    if mapping is None:
        return int(kvcache.start_layer) + index
    return next(int(n) for n, (i, swa) in mapping.items() if i == index and swa == (pool == "swa"))


def live_pages(scheduler: Any, request: Any, pool: str) -> list[int]:
    """The complete pages of a request that its next token attends to, in order."""
    allocator = scheduler.token_to_kv_pool_allocator
    size = int(allocator.page_size)
    # The last committed token may be the one that this step writes.
    written = req_kv.committed(request) - 1
    first = 0
    row = scheduler.req_to_token_pool.req_to_token[req_kv.row(request)]
    if pool == "swa":
        window = int(scheduler.tree_cache.sliding_window_size)
        first = max(0, -(-(written + 2 - window) // size))
    tokens = row[first * size : written // size * size : size].long()
    if pool == "swa":
        tokens = allocator.full_to_swa_index_mapping[tokens]
    return [page for page in (tokens // size).tolist() if page > 0]


def used_buffers(kv_pool: Any, page: int, size: int) -> list[tuple[str, int]]:
    """("K", "V" or "KV", layer index) of each buffer in which this page was written.

    A KV-shared layer has buffers, too, but never uses them: the rows of a page are all alike.
    """
    import torch

    found = []
    for name, buffers in buffers_of(kv_pool).items():
        for index, buffer in enumerate(buffers):
            rows = buffer[page * size : (page + 1) * size]
            if size == 1:  # compare with an empty row; kv-integrity stamps the first 8 bytes of it
                words = rows.view(-1).view(torch.uint8)[8:]
                used = bool(words.any())
            else:
                used = bool((rows != rows[0]).any())
            if used:
                found.append((name, index))
    return found


def spoil(injection: Injection, change: Callable[[torch.Tensor, Injection, Action], str]) -> None:
    """Let ``change(row, injection, action)`` spoil one token's K or V in a live, complete page.

    row: [heads, dim] of the KV dtype, a view of the pool. ``change`` returns what it did, in words.
    """

    @injection.before("scheduler.run_batch")
    def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if batch.forward_mode is None or not batch.forward_mode.is_decode():
            return
        allocator = scheduler.token_to_kv_pool_allocator
        pools = pools_of(allocator)
        live: dict[str, list[tuple[Any, list[int]]]] = {
            pool: [
                (request.rid, pages)
                for request in batch.reqs
                if not request.finished() and (pages := live_pages(scheduler, request, pool))
            ]
            for pool in pools
        }
        # Wait until each pool has such a page, so that every task can do what it says.
        drafts = speculation.draft_parts(scheduler)
        able = all(live.values()) and (bool(drafts) or not asks_for(injection, "draft"))
        action = injection.fire() if able else None
        if action is None:
            return
        pool = injection.random.choice(pools) if action.task not in pools else action.task
        draft = injection.random.choice(drafts) if action.task == "draft" else None
        pool = pool if draft is None else draft.pages
        rid, pages = injection.random.choice(live[pool])
        page = injection.random.choice(pages)
        size = int(allocator.page_size)
        kv_pool = attention_pool(part(allocator, pool).get_kvcache())
        kv_pool = kv_pool if draft is None else draft.pool
        name, index = injection.random.choice(used_buffers(kv_pool, page, size))
        slot = injection.random.randrange(size)
        buffer = buffers_of(kv_pool)[name][index]
        # An FP8 pool stores its rows as bytes.
        what = change(buffer[page * size + slot].view(kv_pool.dtype), injection, action)
        of = layer_id(allocator, pool, index) if draft is None else draft.model + index
        layer = f"layer {of}" + (" of the draft" if draft is not None else "")
        injection.log(f"{what} in {name} of {layer}, {pool} page {page} slot {slot}, of {rid}")
