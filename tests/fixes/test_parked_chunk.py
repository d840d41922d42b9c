"""parked-chunk: what a prompt that waits for its next chunk gives back, on SGLang's own pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pytest
import releases
import torch

from g4debug.fixes import parked_chunk
from g4debug.fixes.base import state_of
from g4debug.fixes.parked_chunk import (
    PATIENCE,
    around_add_chunked,
    around_check,
    before_prepare,
    give_back,
)
from g4debug.hooking import req_kv, targets
from g4debug.hooking.prefix_sharing import keeps_prefixes

FULL, SWA = 2048, 1024  # tokens
# 0.5.21 itself is at odds with some windows, but not with Gemma's: a token fewer than whole pages.
ONE = targets.matches(">=0.5.21,<0.5.22")
WINDOW = 63 if ONE else 100  # tokens


class Other:
    """A request that has nothing to do with the prompt."""


OTHER = Other()


@pytest.fixture(autouse=True)
def args(monkeypatch):
    """Server arguments that say that nobody else may need the pages of a prompt."""
    args = SimpleNamespace(disaggregation_mode="null", pp_size=1, enable_hierarchical_cache=False)
    monkeypatch.setattr(parked_chunk, "arguments", lambda: args)
    for name, kind in (("_waits", WeakKeyDictionary), ("_starved", WeakSet)):
        monkeypatch.setattr(parked_chunk, name, kind())
    return args


class Pools:
    """SGLang's own pools and prefix cache for one row of requests. tree: with a radix tree."""

    def __init__(self, page: int, tree: bool = False, **given) -> None:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        releases.configure(page_size=page, disaggregation_mode="null")
        self.rows = ReqToTokenPool(4, FULL, "cpu", False)
        pool = releases.swa_pool(FULL, SWA, page, 8, [0], [1])
        new = releases.allocator_class("swa.init")
        self.allocator = new(FULL, SWA, page, torch.float32, "cpu", pool, False)
        self.tree = releases.prefix_cache(
            self.rows, self.allocator, page, WINDOW, disable=not tree, **given
        )

    def alloc(self, tokens: int) -> torch.Tensor:
        if self.allocator.page_size == 1:
            return self.allocator.alloc(tokens)
        zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
        return self.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)

    def asks(self, admitted: bool = False, beside: tuple = ()) -> None:
        """The scheduler asks for the next chunk in a round; SGLang's answer. beside: who runs."""
        adder = SimpleNamespace(
            tree_cache=self.tree, token_to_kv_pool_allocator=self.allocator, can_run_list=[],
            running_batch=SimpleNamespace(reqs=list(beside)),
        )  # fmt: skip

        def sglangs(adder, request):
            if admitted:
                adder.can_run_list.append(request)
            return request

        assert around_add_chunked(sglangs, adder, self.request) is self.request

    def launches(self, *others: Any) -> None:
        """A chunk of the prompt is launched, or a batch of others."""
        before_prepare(SimpleNamespace(reqs=list(others) or [self.request]))

    def last_decode(self, wanted: int, requests: int = 1, selected: Any = None) -> bool:
        """A decode step wants so many SWA pages' tokens; whether they are there in the end."""
        batch = SimpleNamespace(
            reqs=[OTHER] * requests, device="cpu", tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
        )  # fmt: skip
        return around_check(lambda batch, selected: self.room() >= wanted, batch, selected)

    def room(self) -> int:
        evictable = self.tree.swa_evictable_size() if keeps_prefixes(self.tree) else 0
        return self.allocator.swa_available_size() + evictable

    def without_swa(self, slots: torch.Tensor) -> list[int]:
        """The tokens without a SWA page, of those that have these slots."""
        mapped = self.allocator.full_to_swa_index_mapping[slots.long()]
        return torch.nonzero(mapped <= 0).flatten().tolist()


class Waiting(Pools):
    """A request that has the KV of ``begin`` tokens of its prompt, and waits for the rest.

    tree: with a prefix cache. The request has handed its tokens to it in chunks that end at
    ``chunks``, and has locked what it reads. pools: it is on these, with tokens of its own.
    """

    def __init__(
        self, page: int, begin: int, tree: bool = False, chunks: tuple = (),
        pools: Pools | None = None,
    ) -> None:  # fmt: skip
        if pools is None:
            super().__init__(page, tree)
        else:
            self.rows, self.allocator, self.tree = pools.rows, pools.allocator, pools.tree
        self.first_token = 0 if pools is None else FULL
        self.request = releases.Request("r")
        (self.row,) = self.rows.alloc([self.request])
        self.request.put(req_pool_idx=self.row, cache_protected_len=0, swa_evicted_seqlen=0)
        self.slots = torch.zeros(0, dtype=torch.int64)
        self.grow(begin)
        for end in chunks:
            self.insert(end)

    def grow(self, tokens: int) -> None:
        """A chunk of so many tokens is computed."""
        self.slots = torch.cat([self.slots, self.alloc(tokens).to(torch.int64)])
        end = len(self.slots)
        self.rows.req_to_token[self.row, :end] = self.slots.to(torch.int32)
        self.request.put(kv_allocated_len=end, kv_committed_len=end)
        self.request.prefix_indices, self.request.prefix_len = self.slots, end

    def insert(self, end: int) -> None:
        """As ``SWARadixCache.cache_unfinished_req`` does it with a chunk."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = range(self.first_token, self.first_token + end)
        key = RadixKey(releases.token_ids(tokens), None)
        protected = self.request.cache_protected_len
        self.tree.insert(InsertParams(key=key, value=self.slots[:end], prev_prefix_len=protected))
        if protected:
            self.unlock()
        self.request.last_node = self.tree.match_prefix(MatchPrefixParams(key)).last_device_node
        lock = self.tree.inc_lock_ref(self.request.last_node)
        self.request.put(
            cache_protected_len=end, swa_uuid_for_lock=lock.swa_uuid_for_lock,
            swa_prefix_lock_released=False,
        )  # fmt: skip

    def unlock(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams

        lock = DecLockRefParams(swa_uuid_for_lock=self.request.swa_uuid_for_lock)
        self.tree.dec_lock_ref(self.request.last_node, lock)

    @property
    def gone(self) -> list[int]:
        """The tokens without a SWA page."""
        return self.without_swa(self.slots)


def test_an_argument_that_a_later_release_adds_is_passed_on():
    def later(adder, request, *more, **named):
        adder.can_run_list.append(request)
        return more, named

    adder = SimpleNamespace(can_run_list=[], running_batch=None)
    assert around_add_chunked(later, adder, Pools, 1, new="x") == ((1,), {"new": "x"})


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("begin", [64, 100, 160, 320, 500, 704])
def test_a_prompt_that_stays_parked_keeps_its_window_and_no_more(sglang, page, begin):
    waiting = Waiting(page, begin)
    for _ in range(3):
        waiting.asks()
    oldest = begin - WINDOW  # that the next token must find
    assert waiting.gone == list(range(len(waiting.gone)))
    assert len(waiting.gone) <= max(0, oldest)
    more = page if targets.matches("<0.5.14") else 0  # SGLang keeps a page more there
    assert len(waiting.gone) > oldest - page - more
    assert releases.evicted(waiting.request) == len(waiting.gone)


def test_its_last_chunk_may_still_run_when_it_is_parked_first(sglang):
    waiting = Waiting(16, 704)
    waiting.asks()
    waiting.asks()
    assert not waiting.gone
    waiting.launches()  # a chunk of it, after all
    waiting.asks()
    waiting.asks()
    assert not waiting.gone
    waiting.asks()
    assert waiting.gone


def test_who_will_be_admitted_when_others_end_gives_nothing_back(sglang):
    """Its wait is what SGLang does on a healthy server; so its chunks are as without the fix."""
    waiting = Waiting(16, 704)
    for _ in range(PATIENCE // 2):
        waiting.asks(beside=(OTHER,))
    assert not waiting.gone
    waiting.asks()  # the last one has ended; its result is processed in this round
    waiting.asks()  # so SGLang finds what that set free in this one
    assert not waiting.gone
    waiting.asks()
    assert waiting.gone


def test_a_batch_of_others_that_is_launched_while_nothing_runs_is_waited_for(sglang):
    waiting = Waiting(16, 704)
    for _ in range(10):
        waiting.asks()
        waiting.asks()
        waiting.launches(OTHER)
    assert not waiting.gone


def test_a_prompt_that_starves_beside_others_gives_back_and_then_waits_no_more(sglang):
    waiting = Waiting(16, 704)
    for _ in range(PATIENCE):
        waiting.asks(beside=(OTHER,))
        waiting.launches(OTHER)
    assert not waiting.gone
    waiting.asks(beside=(OTHER,))
    assert waiting.gone
    gone = len(waiting.gone)
    waiting.grow(192)
    waiting.launches()
    waiting.asks(beside=(OTHER,))  # its chunk may be in flight
    assert len(waiting.gone) == gone
    waiting.asks(beside=(OTHER,))
    assert len(waiting.gone) == gone + 192


def test_while_a_hierarchical_cache_copies_pages_nothing_runs_and_yet_they_come_free(sglang, args):
    args.enable_hierarchical_cache = True
    waiting = Waiting(16, 704)
    for _ in range(PATIENCE):
        waiting.asks()
    assert not waiting.gone
    waiting.asks()
    assert waiting.gone


def test_before_the_last_decode_is_ended_the_prompt_gives_back(sglang):
    waiting = Waiting(16, 704)
    wanted = waiting.room() + 1
    waiting.asks(beside=(OTHER,))
    assert waiting.last_decode(waiting.room())  # it has its pages
    assert not waiting.last_decode(wanted, requests=2)  # SGLang retracts another one
    assert not waiting.gone
    assert waiting.last_decode(wanted)
    assert waiting.gone
    assert not waiting.last_decode(10_000)


def test_when_others_were_retracted_the_decode_is_the_last(sglang):
    waiting = Waiting(16, 704)
    waiting.asks(beside=(OTHER, OTHER))
    assert waiting.last_decode(waiting.room() + 1, requests=2, selected=[1])
    assert waiting.gone


def test_a_prompt_whose_chunk_was_launched_is_no_help_to_a_decode(sglang):
    waiting = Waiting(16, 704)
    waiting.asks(beside=(OTHER,))
    waiting.launches()
    assert not waiting.last_decode(waiting.room() + 1)
    assert not waiting.gone


def test_one_that_was_aborted_while_it_was_parked_has_nothing_to_give(sglang):
    waiting = Waiting(16, 704)
    waiting.asks(beside=(OTHER,))
    waiting.request.put(req_pool_idx=None)
    assert not waiting.last_decode(waiting.room() + 1)
    assert not waiting.gone


def test_where_a_decode_finds_no_pages_the_device_is_waited_for(sglang, monkeypatch):
    """The prompt's last chunk may be in flight then: it is parked in this very round."""
    waiting, waits = Waiting(16, 704), []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: waits.append(len(waiting.gone)))
    waiting.asks(beside=(OTHER,))
    assert waiting.last_decode(waiting.room() + 1)
    assert waits == [0]


def test_a_prompt_whose_chunks_are_admitted_is_left_alone(sglang):
    waiting = Waiting(16, 704)
    for _ in range(3):
        waiting.asks(admitted=True)
        waiting.launches()
    assert not waiting.gone


old_tree = pytest.mark.skipif(
    not targets.matches("<0.5.18"), reason="its prefix cache cuts a leaf behind the window itself"
)


@old_tree
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("chunks", [(640,), (640, 704), (320, 640, 704), (64, 80), (112,), (704,)])
def test_in_a_prefix_cache_it_locks_its_window_and_no_more(sglang, page, chunks):
    waiting = Waiting(page, chunks[-1], tree=True, chunks=chunks)
    total = chunks[-1]
    for _ in range(3):
        waiting.asks()
    window = -(-WINDOW // page) * page
    assert waiting.tree.swa_protected_size() == min(window, total)
    assert waiting.tree.swa_evictable_size() == max(0, total - window)
    assert waiting.tree.full_protected_size() == total
    waiting.unlock()
    assert waiting.tree.swa_protected_size() == waiting.tree.full_protected_size() == 0
    waiting.tree.sanity_check()
    assert not waiting.gone  # it is evicted when somebody needs it


@old_tree
@pytest.mark.parametrize("parked_first", [True, False])
def test_beside_last_decode_each_gives_what_it_has(sglang, parked_first):
    """The decode's own prompt and the parked one are long leaves; both fixes are in force."""
    from g4debug.fixes import last_decode

    waiting = Waiting(16, 448, tree=True, chunks=(448,))
    decodes = Waiting(16, 448, chunks=(448,), pools=waiting)
    decodes.request.put(decode_batch_idx=1)
    waiting.asks(beside=(decodes.request,))
    batch = SimpleNamespace(
        reqs=[decodes.request], device="cpu", tree_cache=waiting.tree,
        token_to_kv_pool_allocator=waiting.allocator,
    )  # fmt: skip

    def step(wanted: int) -> bool:
        def sglangs(batch, selected=None):
            return waiting.room() >= wanted

        inner, outer = last_decode.around_check, around_check
        if parked_first:
            inner, outer = outer, inner

        def wrapped(batch, selected=None):
            return inner(sglangs, batch, selected)

        return outer(wrapped, batch)

    window = -(-WINDOW // 16) * 16
    both = SWA - 2 * window
    assert step(both)
    assert waiting.tree.swa_protected_size() == 2 * window
    assert not step(both + 1)
    waiting.unlock()
    decodes.unlock()
    assert waiting.tree.swa_protected_size() == waiting.tree.full_protected_size() == 0
    waiting.tree.sanity_check()


@old_tree
def test_another_requests_lock_holds(sglang):
    waiting = Waiting(16, 704, tree=True, chunks=(640, 704))
    node = waiting.request.last_node.parent
    lock = waiting.tree.inc_lock_ref(node)
    for _ in range(3):
        waiting.asks()
    assert waiting.tree.swa_protected_size() == 704
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams

    waiting.tree.dec_lock_ref(node, DecLockRefParams(swa_uuid_for_lock=lock.swa_uuid_for_lock))
    waiting.unlock()
    assert waiting.tree.swa_protected_size() == waiting.tree.full_protected_size() == 0
    waiting.tree.sanity_check()


class Prefixed(Pools):
    """Pools of 0.5.21 and later, with a request of SGLang's own that has begun its prompt."""

    request: Any

    def begins(self, tokens: Any, begin: int) -> None:
        """It has room for ``begin`` tokens of its prompt, and has locked what the cache has."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.request = Req("r", "", tokens, SamplingParams(max_new_tokens=8), vocab_size=FULL)
        self.request.init_next_round_input(self.tree)
        if hasattr(self.tree, "lock"):
            self.request.lock = self.tree.lock(self.request.last_node)
        else:
            lock = self.tree.inc_lock_ref(self.request.last_node)
            self.request.lock_receipt = lock.to_dec_params()
        self.rows.alloc([self.request])
        self.slots = self.alloc(begin)
        self.rows.req_to_token[self.request.kv.req_pool_idx, :begin] = self.slots.to(torch.int32)
        self.request.kv.kv_allocated_len = self.request.kv.kv_committed_len = begin

    def computed(self, end: int) -> None:
        """A chunk that ends there is computed, and SGLang hands it to the cache."""
        if hasattr(self.tree, "checkpoint"):
            self.request.extend_end = end
            self.tree.checkpoint(self.request, up_to=end)
            self.request.prefix_len = end
        else:
            self.request.set_extend_range(0, end)
            self.tree.cache_unfinished_req(self.request, chunked=True)

    def unlock(self) -> None:
        if hasattr(self.tree, "unlock"):
            self.tree.unlock(self.request.lock)
        else:
            self.tree.unpin(self.request)

    @property
    def row(self) -> torch.Tensor:
        begin = req_kv.prefix(self.request)
        return self.rows.req_to_token[self.request.kv.req_pool_idx, :begin]


class Branching(Prefixed):
    """A request whose prompt parts from another at ``branch``, where the prefix cache has no SWA
    pages left. The KV of ``begin`` tokens is there. bigram: the keys of the cache are bigrams.
    """

    def __init__(self, page: int, begin: int, bigram: bool) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        super().__init__(page, tree=True, is_eagle=bigram)
        tokens = releases.token_ids(range(1, begin + 200))
        shared = RadixKey(tokens[: 320 + bigram], None, bigram)
        self.tree.insert(InsertParams(key=shared, value=self.alloc(320)))
        self.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=SWA))
        self.begins(tokens, begin)
        self.branch = self.request.swa_branching_seqlen
        self.computed(begin)

    def left(self) -> int:
        return self.allocator.swa_available_size() + self.tree.swa_evictable_size()


@pytest.mark.skipif(
    targets.matches("<0.5.21"), reason="it hands all of a prompt over, or otherwise"
)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("begin", [448, 640, 700])
@pytest.mark.parametrize("bigram", [False, True])
def test_what_lies_behind_the_branch_is_handed_over(sglang, page, begin, bigram):
    waiting = Branching(page, begin, bigram)
    waiting.asks()
    assert 0 < waiting.request.kv.cache_protected_len == waiting.branch < begin - 2 * WINDOW
    assert waiting.tree.swa_protected_size() >= WINDOW
    for _ in range(3):
        waiting.asks()
    handed_over = (begin - bigram) // page * page
    window = -(-WINDOW // page) * page
    assert waiting.request.kv.cache_protected_len == handed_over
    assert waiting.tree.swa_protected_size() == window
    assert waiting.left() == SWA - window - -(-(begin - handed_over) // page) * page
    assert all(gone < begin - WINDOW for gone in waiting.without_swa(waiting.row))
    waiting.unlock()
    assert waiting.tree.swa_protected_size() == waiting.tree.full_protected_size() == 0
    waiting.tree.sanity_check()


class InChunks(Prefixed):
    """A prompt of which the prefix cache got each of two chunks, the second one a short one."""

    def __init__(self, page: int, chunks: tuple[int, int], bigram: bool) -> None:
        super().__init__(page, tree=True, is_eagle=bigram)
        whole = sum(chunks)
        self.begins(releases.token_ids(range(1, whole + 200)), whole)
        for end in (chunks[0], whole):
            self.computed(end)


@pytest.mark.skipif(targets.matches("<0.5.21"), reason="it cuts the leaf itself, or otherwise")
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("chunks", [(192, 64), (320, 64), (256, 128), (448, 16)])
@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_chunk_shorter_than_the_window_locks_no_more_than_the_window(
    sglang, monkeypatch, page, chunks, bigram, core
):
    """The leaf of such a chunk is short, so the lock reaches into the node above it."""
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    waiting = InChunks(page, chunks, bigram)
    kept = waiting.row.tolist()
    for _ in range(3):
        waiting.asks()
    handed_over = (sum(chunks) - bigram) // page * page
    assert waiting.request.kv.cache_protected_len == handed_over
    assert waiting.tree.swa_protected_size() == min(handed_over, -(-WINDOW // page) * page)
    assert waiting.row.tolist() == kept
    waiting.tree.sanity_check()
    waiting.unlock()
    assert waiting.tree.swa_protected_size() == waiting.tree.full_protected_size() == 0
    waiting.tree.sanity_check()


@pytest.mark.skipif(targets.matches("<0.5.21"), reason="it hands all of a prompt over")
@pytest.mark.parametrize("why", ["states of linear layers", "not inserted"])
def test_where_nothing_may_be_handed_over_nothing_is_given_back(sglang, monkeypatch, why):
    waiting = Branching(16, 640, bigram=False)
    if why == "states of linear layers":
        monkeypatch.setattr(waiting.tree, "supports_mamba", lambda: True)
    else:
        waiting.request.skip_radix_cache_insert = True
    left, gone = waiting.left(), waiting.without_swa(waiting.row)
    for _ in range(3):
        waiting.asks()
    assert waiting.request.kv.cache_protected_len == waiting.branch
    assert (waiting.left(), waiting.without_swa(waiting.row)) == (left, gone)


@pytest.mark.skipif(not ONE, reason="it is the one that loses what it is handed there")
def test_where_it_would_find_less_than_a_window_it_is_left_alone(sglang, monkeypatch):
    monkeypatch.setitem(globals(), "WINDOW", 68)
    waiting = Branching(16, 646, bigram=False)
    left, gone = waiting.left(), waiting.without_swa(waiting.row)
    for _ in range(3):
        waiting.asks()
    assert (waiting.left(), waiting.without_swa(waiting.row)) == (left, gone)
    assert waiting.request.kv.cache_protected_len == waiting.branch


@pytest.mark.parametrize("argument", [{"disaggregation_mode": "prefill"}, {"pp_size": 2}])
def test_where_others_may_need_its_pages_nothing_is_given_back(sglang, args, argument):
    vars(args).update(argument)
    waiting = Waiting(16, 704)
    for _ in range(3):
        waiting.asks()
    assert not waiting.gone


@pytest.mark.skipif(targets.matches("<0.5.21"), reason="it cuts the leaf itself, or otherwise")
@pytest.mark.parametrize("argument", [{"disaggregation_mode": "prefill"}, {"pp_size": 2}])
def test_with_a_prefix_cache_neither(sglang, args, argument):
    vars(args).update(argument)
    waiting = Branching(16, 640, bigram=False)
    left, gone = waiting.left(), waiting.without_swa(waiting.row)
    for _ in range(3):
        waiting.asks()
    assert (waiting.left(), waiting.without_swa(waiting.row)) == (left, gone)


def test_a_prefix_cache_that_cannot_be_handed_more_is_left_alone(sglang):
    """As before 0.5.21: with pools, it would be an error that it has none here."""
    tree = SimpleNamespace(supports_swa=lambda: True, is_chunk_cache=lambda: False)
    give_back(tree, None, releases.Request("r"))


def test_it_is_in_force_by_default_and_has_a_switch(arm):
    arm()
    assert state_of("parked-chunk") == "applied"
    arm(G4DEBUG_FIX_PARKED_CHUNK="0")
    assert state_of("parked-chunk") == "off"
