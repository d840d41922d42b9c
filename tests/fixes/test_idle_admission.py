"""idle-admission: when a request that was refused is asked for again, and with which need."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from g4debug.fixes import _twice_refused, idle_admission
from g4debug.fixes.base import state_of
from g4debug.fixes.idle_admission import around_add, around_need

PAGE, POOL = 64, 768
NO, YES = SimpleNamespace(name="NO_TOKEN"), SimpleNamespace(name="CONTINUE")


class UnifiedRadixCache:
    """A prefix cache with one prefix. ``evicted``: how often it was told to give all back."""

    def __init__(self) -> None:
        self.evicted = 0

    def evict(self, params) -> None:
        self.evicted += 1


class Adder:
    """A PrefillAdder that refuses what needs more than ``room``, and admits the rest."""

    def __init__(self, tree: UnifiedRadixCache, room: int, running: tuple = (), **more) -> None:
        self.tree_cache, self.room, self.page_size = tree, room, PAGE
        self.can_run_list: list = []
        self.running_batch = SimpleNamespace(reqs=list(running))
        self.rem_chunk_tokens = 1024
        self.is_hybrid_swa, self.dllm_config, self.prefill_delayer_single_pass = True, None, None
        self.token_to_kv_pool_allocator = SimpleNamespace(size_full=8192, size_swa=POOL)
        self.__dict__.update(more)

    @property
    def rem_swa_tokens(self) -> int:
        return self.room

    @contextmanager
    def _lock_node(self, node):
        yield

    def ceil_paged_tokens(self, tokens: int) -> int:
        return -(-tokens // PAGE) * PAGE


class Request:
    def __init__(self, tokens: int) -> None:
        self.tokens, self.last_node = tokens, None


def sglangs_need(adder, tokens: int) -> int:
    return max(min(tokens, adder.rem_chunk_tokens), 128) + PAGE


def sglangs_add(adder, req, has_chunked_req, align):
    if around_need(sglangs_need, adder, req.tokens) >= adder.rem_swa_tokens:
        return NO
    adder.can_run_list.append((req, min(req.tokens, adder.rem_chunk_tokens)))
    return YES


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    args = SimpleNamespace(disaggregation_mode="null", pp_size=1, enable_hierarchical_cache=False)
    for module in (idle_admission, _twice_refused):
        monkeypatch.setattr(module, "arguments", lambda: args)
    around_add._refused.clear()
    return args


@pytest.fixture
def tree(sglang):
    return UnifiedRadixCache()


def asked(req, rounds: int, *given, chunked: bool = False, **more) -> Adder:
    """The adder of the last of these rounds, each of which asks for the request once."""
    for _ in range(rounds):
        adder = Adder(*given, **more)
        assert around_add(sglangs_add, adder, req, chunked, None) in (NO, YES)
    return adder


def test_the_second_round_admits_a_chunk_that_fits(tree):
    req = Request(600)
    assert asked(req, 1, tree, 512).can_run_list == []
    assert asked(req, 1, tree, 512).can_run_list == [(req, 384)]  # 384 + a page < 512
    assert tree.evicted == 0


def test_a_short_rest_needs_no_whole_window(tree):
    req = Request(20)
    assert asked(req, 2, tree, 192).can_run_list == [(req, 20)]


def test_nobody_joins_a_request_that_was_admitted_so(tree):
    req = Request(600)
    asked(req, 1, tree, 512)
    assert around_add(sglangs_add, Adder(tree, 512), req, False, None) is NO


def test_an_argument_that_a_later_release_adds_is_passed_on(tree):
    got = []

    def later(adder, req, has_chunked_req, **named):
        got.append(named)
        return NO

    req = Request(600)
    for _ in range(2):
        around_add(later, Adder(tree, 512), req, has_chunked_req=False, align=64, new="x")
    assert got == [{"align": 64, "new": "x"}] * 3  # the second round asks once more


def test_if_there_is_no_room_for_a_page_the_prefix_cache_goes(tree):
    req = Request(600)
    assert asked(req, 2, tree, 64).can_run_list == []
    assert tree.evicted == 1


@pytest.mark.parametrize(
    "more",
    [
        {"running": ("other",)},
        {"chunked": True},
        {"is_hybrid_swa": False},
        {"dllm_config": "a block"},
        {"prefill_delayer_single_pass": "asks all ranks"},
        {"memory_budget": SimpleNamespace(remaining_swa=512, req_ring=False)},
    ],
)
def test_elsewhere_a_refusal_stays(tree, more):
    assert asked(Request(600), 5, tree, 512, **more).can_run_list == []
    assert tree.evicted == 0


@pytest.mark.parametrize(
    "argument",
    [{"disaggregation_mode": "prefill"}, {"pp_size": 2}, {"enable_hierarchical_cache": True}],
)
def test_where_others_may_hold_pages_a_refusal_stays(tree, alone, argument):
    alone.__dict__.update(argument)
    assert asked(Request(600), 5, tree, 512).can_run_list == []


def test_a_cache_with_an_external_store_may_have_transfers_under_way(tree):
    tree.linker = "of 0.5.23"
    assert asked(Request(600), 5, tree, 64).can_run_list == []
    assert tree.evicted == 0


def test_a_round_in_which_something_runs_begins_anew(tree):
    req = Request(600)
    asked(req, 1, tree, 512)
    asked(req, 1, tree, 512, running=("other",))
    assert asked(req, 1, tree, 512).can_run_list == []
    assert asked(req, 1, tree, 512).can_run_list


def test_another_request_begins_anew(tree):
    asked(Request(600), 1, tree, 512)
    assert asked(Request(600), 1, tree, 512).can_run_list == []


def test_who_is_admitted_is_left_alone(tree):
    req = Request(300)
    assert asked(req, 3, tree, 512).can_run_list == [(req, 300)]


def test_it_is_in_force_by_default_and_has_a_switch(arm):
    arm()
    assert state_of("idle-admission") == "applied"
    arm(G4DEBUG_FIX_IDLE_ADMISSION="0")
    assert state_of("idle-admission") == "off"
