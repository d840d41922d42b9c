"""Each slot of the full-to-SWA mapping counts, with pages of one token, of 16 and of 64.

SGLang's own SWA allocator and rows of ``req_to_token`` have two requests; one slot of the mapping
is changed behind everybody's back. What is judged needs nothing of our ledger.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import releases
import torch
from allocator_model import FULL, SWA, Model

from g4debug.ledger.holders import Holders

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
    pytest.mark.usefixtures("sglang"),
]
SIZES = (1, 16, 64)


class Two:
    """Two requests of three pages and some tokens, and what judges their mapping."""

    def __init__(self, size: int) -> None:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        self.size, self.length = size, 3 * size + size // 2
        pool = releases.swa_pool(FULL * size, SWA * size, size, 1, [0], [1])
        self.allocator = Model(size, pool).real
        rows = ReqToTokenPool(4, 8 * size, "cpu", False)
        self.requests = []
        for rid in ("a", "b"):
            request = releases.Request(rid)
            (row,) = rows.alloc([request])
            request.put(req_pool_idx=row, kv_allocated_len=self.length)
            rows.req_to_token[row, : self.length] = self.take(self.length).to(torch.int32)
            self.requests.append(request)
        self.table = rows.req_to_token
        self.holders = Holders(self.allocator)
        tree = SimpleNamespace(root_node=SimpleNamespace(children={}))
        self.holders.scheduler = SimpleNamespace(
            req_to_token_pool=rows, tree_cache=tree, running_batch=None, last_batch=None
        )

    def take(self, count: int) -> torch.Tensor:
        if self.size == 1:
            return self.allocator.alloc(count)
        none, all_ = torch.tensor([0]), torch.tensor([count])
        return self.allocator.alloc_extend(none, none, all_, all_, torch.tensor([-1]), count)

    @property
    def mapping(self) -> torch.Tensor:
        return self.allocator.full_to_swa_index_mapping

    def token(self, request: int, position: int) -> int:
        """The full slot of a request's token."""
        return int(self.table[releases.kv_of(self.requests[request]).req_pool_idx, position])

    def said(self, token: int) -> str:
        return self.holders.wrong_slot(token, self.requests)

    def contradicts(self, token: int) -> bool:
        page = np.array([token // self.size])
        return self.holders.mapping_contradicts(page, np.array([], dtype=np.int64), self.requests)


def anothers(it: Two, token: int, position: int) -> int:
    return int(it.mapping[it.token(1, position)])


def its_own_elsewhere(it: Two, token: int, position: int) -> int:
    return int(it.mapping[it.token(0, (position + it.size) % it.length)])


def out_of_range(it: Two, token: int, position: int) -> int:
    return (SWA + 3) * it.size


def negative(it: Two, token: int, position: int) -> int:
    return -1


def next_one(it: Two, token: int, position: int) -> int:
    return int(it.mapping[token]) + 1


def zero(it: Two, token: int, position: int) -> int:
    return 0


WRONG = [anothers, its_own_elsewhere, out_of_range, negative, next_one, zero]
# The slot in its page: the first, one in the middle, the last; and the last one that is in use.
PLACES = {"first": lambda size: 0, "middle": lambda size: size // 2, "last": lambda size: size - 1}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_slot_is_told(size, place, wrong):
    it = Two(size)
    position = size + PLACES[place](size)  # of the second page
    token = it.token(0, position)
    assert it.said(token) == ""
    assert not it.contradicts(token)
    value = wrong(it, token, position)
    assert value != int(it.mapping[token])
    it.mapping[token] = value
    if size == 1 and wrong is zero:  # as if it were evicted: only who needs it knows better
        assert it.said(token) == ""
        return
    said = it.said(token)
    assert said.startswith(f"it says {value}" if value < 0 or value >= SWA * size + size else
                           f"it says slot {value}"), said  # fmt: skip
    assert it.contradicts(token)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("by", [1, -1, 5])
def test_a_page_whose_slots_are_all_moved_is_told(size, by):
    """They still follow each other, so only their place in the SWA page tells."""
    it = Two(size)
    begin = it.token(0, size)
    it.mapping[begin : begin + size] += by
    for token in (begin, begin + size // 2, begin + size - 1):
        assert it.said(token).startswith(f"it says slot {int(it.mapping[token])}, place ")
        assert it.contradicts(token)


@pytest.mark.parametrize("size", SIZES)
def test_a_sound_slot_is_not(size):
    it = Two(size)
    for request in (0, 1):
        for position in range(it.length):
            assert it.said(it.token(request, position)) == ""
            assert not it.contradicts(it.token(request, position))


@pytest.mark.parametrize("size", [16, 64])
def test_what_no_token_has_had_yet_may_have_any_value(size):
    it = Two(size)
    last = it.token(0, it.length - 1)
    it.mapping[last + 1 : last // size * size + size] = anothers(it, last, 0)
    assert it.said(last) == ""
    assert not it.contradicts(last)


@pytest.mark.parametrize("size", SIZES)
def test_a_slot_that_names_a_free_page_contradicts(size):
    it = Two(size)
    token = it.token(0, size)
    free = int(releases.free_list(it.allocator.swa_attn_allocator)[-1])
    it.mapping[token] = free * size
    assert it.contradicts(token)
