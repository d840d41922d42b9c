"""An SGLang plugin of the engine tests: one corruption of each of SGLang's structures.

It works as hand_over_meddler does, with the cases below beside that one's.
"""

from __future__ import annotations

from typing import Any

import hand_over_meddler
import torch
from hand_over_meddler import ANYTIME, CASES, OWN, PLACES, case

TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
PLACES |= {
    "metadata": "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"
    ".init_forward_metadata",
    "insert": f"{TREE}.insert",
    "match": f"{TREE}.prefix_device_indices",
}
ANYTIME |= {"insert", "match"}


def row(batch: Any, request: int) -> torch.Tensor:
    """The row of ``req_to_token`` of a request of the batch; writing into it changes SGLang's."""
    holder = getattr(batch.reqs[request], "kv", batch.reqs[request])
    return batch.req_to_token_pool.req_to_token[holder.req_pool_idx]


def size(batch: Any) -> int:
    return int(batch.token_to_kv_pool_allocator.page_size)


def committed(batch: Any, request: int) -> int:
    return int(getattr(batch.reqs[request], "kv", batch.reqs[request]).kv_committed_len)


@case("metadata")
def table(none, backend, forward_batch, *args, **kwargs):
    """The target's."""
    if not forward_batch.forward_mode.is_target_verify():
        return False
    made = backend.forward_metadata.page_table
    made[1, 0] = made[0, 0]
    return True


@case("run_batch", "before")
def row_twice(scheduler, batch, *args, **kwargs):
    cells, n = row(batch, 0), size(batch)
    cells[n : 2 * n] = cells[2 * n : 3 * n].clone()


@case("run_batch", "before")
def row_foreign(scheduler, batch, *args, **kwargs):
    cells, n = row(batch, 0), size(batch)
    cells[n : 2 * n] = row(batch, 1)[:n]


@case("run_batch", "before")
def mapping_slot(scheduler, batch, *args, **kwargs):
    """One slot that this verify writes."""
    mapping = batch.token_to_kv_pool_allocator.full_to_swa_index_mapping
    mine, its = (int(row(batch, r)[committed(batch, r) + 4]) for r in (0, 1))
    mapping[mine] = mapping[its].clone()


@case("run_batch", "before")
def mapping_page(scheduler, batch, *args, **kwargs):
    """The whole page before the one that is written."""
    mapping, n = batch.token_to_kv_pool_allocator.full_to_swa_index_mapping, size(batch)
    mine = int(row(batch, 0)[(committed(batch, 0) // n - 1) * n])
    its = int(row(batch, 1)[0])
    mapping[mine : mine + n] = mapping[its : its + n].clone()


@case("run_batch", "before")
def rows(scheduler, batch, *args, **kwargs):
    batch.req_pool_indices = batch.req_pool_indices.clone()
    batch.req_pool_indices[:2] = batch.req_pool_indices[[1, 0]]


@case("insert", "before")
def insert_twice(tree, params):
    n = tree.page_size
    if len(params.value) < 2 * n:
        return False
    params.value = params.value.clone()
    params.value[:n] = params.value[n : 2 * n]
    return True


@case("match")
def match_rolled(slots, tree, request):
    slots.copy_(slots.roll(tree.page_size))


def lose_one(allocator: Any) -> None:
    allocator.free_pages = allocator.free_pages[1:]


@case("run_batch", "before")
def leak_full(scheduler, batch, *args, **kwargs):
    lose_one(batch.token_to_kv_pool_allocator.full_attn_allocator)


@case("run_batch", "before")
def leak_swa(scheduler, batch, *args, **kwargs):
    lose_one(batch.token_to_kv_pool_allocator.swa_attn_allocator)


@case("run_batch", "before")
def freed(scheduler, batch, *args, **kwargs):
    """The first page of a request that runs, which the prefix cache has, is free on a sudden."""
    batch.token_to_kv_pool_allocator.free_full(row(batch, 0)[: size(batch)].long())


NAMES = {"draft-bonus", "result-lens", "output-one", "map-length"} | CASES.keys() - OWN
register = hand_over_meddler.register
