"""Writes KV into a freed page, as a forward with a stale page table or stale out_cache_loc does.

It writes one token's K and V in every layer of the pool. The page is in the allocator's free list
and belonged to somebody before. It does so between two steps, so that whoever gets the page next
cannot notice it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from g4debug.faults._allocator import Allocators, free_list, pages, part
from g4debug.faults._kv import TASKS, pools_of
from g4debug.faults.base import Fault, Injection
from g4debug.hooking.kv_buffers import buffers_of
from g4debug.hooking.layer_pools import attention_pool

if TYPE_CHECKING:
    import torch


def install(injection: Injection) -> None:
    import torch

    freed: dict[str, set[int]] = {"full": set(), "swa": set()}
    allocators = Allocators(injection)

    def before_free(allocator: Any, free_index: torch.Tensor) -> None:
        freed[allocators.pool_of(allocator)].update(pages(free_index, allocator.page_size))

    def before_release(allocator: Any, *page_ids: torch.Tensor) -> None:
        freed[allocators.pool_of(allocator)].update(torch.cat(page_ids).tolist())

    @injection.before("scheduler.run_batch")
    def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        allocator = scheduler.token_to_kv_pool_allocator
        pools = pools_of(allocator)
        free = {}
        for pool in pools:
            listed = free_list(part(allocator, pool)).tolist()
            free[pool] = [page for page in listed if page in freed[pool]]
        # Wait until each pool has such a page, so that every task can do what it says.
        action = injection.fire() if all(free.values()) else None
        if action is None:
            return
        pool = injection.random.choice(pools) if action.task not in pools else action.task
        page = injection.random.choice(free[pool])
        size = int(allocator.page_size)
        slot = injection.random.randrange(size)
        write(attention_pool(part(allocator, pool).get_kvcache()), page * size + slot, injection)
        injection.log(f"{pool} page {page} slot {slot}, K and V of every layer")

    for site, before in (
        ("pool.free", before_free),
        ("pool.free.token", before_free),  # page size 1 has an allocator of its own
        ("pool.release", before_release),
    ):
        injection.before(site, optional=True)(before)


def write(kv_pool: Any, token: int, injection: Injection) -> None:
    """Write one token's K and V: finite random numbers, which are the same for the same seed."""
    import torch

    generator = torch.Generator().manual_seed(injection.random.randrange(1 << 30))
    for buffer in itertools.chain(*buffers_of(kv_pool).values()):
        row = torch.randn(buffer.shape[1:], generator=generator)
        stored = row.to(kv_pool.dtype).view(buffer.dtype)
        buffer[token] = stored.to(buffer.device)


FAULT = Fault(
    id="kv-write-freed",
    title="a token's KV is written into a page that is free",
    tasks=TASKS,
    caught_by=("kv-integrity",),
    drills=("1*full", "1*swa"),
)
