"""ignore-eos-admission: when a refused request is asked for again, and what that counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.fixes import _twice_refused
from g4debug.fixes.base import state_of
from g4debug.fixes.ignore_eos_admission import around_add

PAGE, POOL = 64, 256
NO, YES = SimpleNamespace(name="NO_TOKEN"), SimpleNamespace(name="CONTINUE")


class PrefillBudget:
    """An empty pool."""

    def __init__(self) -> None:
        self.current_offset = 0


class SWAPrefillBudget(PrefillBudget):
    """Of a hybrid model."""


class Adder:
    """A PrefillAdder, without a prefix cache, which counts as SGLang 0.5.23 does."""

    def __init__(self, running: tuple = (), **more) -> None:
        self.tree_cache = SimpleNamespace(disable=True)
        self.memory_budget, self.per_req_token_overhead = PrefillBudget(), PAGE
        self.can_run_list: list = []
        self.running_batch = SimpleNamespace(reqs=list(running))
        self.dllm_config, self.prefill_delayer_single_pass, self.req_states = None, None, None
        self.__dict__.update(more)


class Request:
    def __init__(self, prompt: int, output: int, ignore_eos: bool = True) -> None:
        self.prompt = prompt
        self.sampling_params = SimpleNamespace(max_new_tokens=output, ignore_eos=ignore_eos)


def sglangs_add(adder, req, has_chunked_req, align):
    adder.req_states = [*(adder.req_states or ()), req.sampling_params.max_new_tokens]
    paged = -(-req.prompt // PAGE) * PAGE + PAGE
    left = POOL - adder.memory_budget.current_offset - paged
    if left - sum(adder.req_states) <= 1:
        return NO
    adder.memory_budget.current_offset += paged
    adder.can_run_list.append(req)
    return YES


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    args = SimpleNamespace(disaggregation_mode="null", pp_size=1)
    monkeypatch.setattr(_twice_refused, "arguments", lambda: args)
    around_add._refused.clear()
    return args


def asked(req, rounds: int, *, chunked: bool = False, **more) -> Adder:
    """The adder of the last of these rounds, each of which asks for the request once."""
    for _ in range(rounds):
        adder = Adder(**more)
        around_add(sglangs_add, adder, req, chunked, None)
    return adder


def test_the_second_round_admits_it_and_counts_its_page_again():
    req = Request(128, 63)  # what SGLang cuts a longer one to
    assert asked(req, 1).can_run_list == []
    adder = asked(req, 1)
    assert adder.can_run_list == [req]
    assert adder.memory_budget.current_offset == 192


def test_nobody_joins_a_request_that_was_admitted_so():
    req = Request(128, 63)
    asked(req, 1)
    assert around_add(sglangs_add, Adder(), req, False, None) is NO


def test_more_than_the_pool_has_stays_refused():
    assert asked(Request(128, 127), 5).can_run_list == []


@pytest.mark.parametrize(
    "more",
    [
        {"running": ("other",)},
        {"chunked": True},
        {"tree_cache": SimpleNamespace(disable=False)},
        {"dllm_config": "a block"},
        {"prefill_delayer_single_pass": "asks all ranks"},
        {"memory_budget": SWAPrefillBudget()},
    ],
)
def test_elsewhere_a_refusal_stays(more):
    assert asked(Request(128, 63), 5, **more).can_run_list == []


def test_without_ignore_eos_a_refusal_stays():
    assert asked(Request(128, 63, ignore_eos=False), 5).can_run_list == []


@pytest.mark.parametrize("argument", [{"disaggregation_mode": "prefill"}, {"pp_size": 2}])
def test_where_others_may_hold_pages_a_refusal_stays(alone, argument):
    alone.__dict__.update(argument)
    assert asked(Request(128, 63), 5).can_run_list == []


def test_a_round_in_which_something_runs_begins_anew():
    req = Request(128, 63)
    asked(req, 1)
    asked(req, 1, running=("other",))
    assert asked(req, 1).can_run_list == []
    assert asked(req, 1).can_run_list == [req]


def test_another_request_begins_anew():
    asked(Request(128, 63), 1)
    assert asked(Request(128, 63), 1).can_run_list == []


@pytest.mark.written_for("ignore-eos-admission")
def test_it_is_in_force_by_default_and_has_a_switch(arm):
    arm()
    assert state_of("ignore-eos-admission") == "applied"
    arm(G4DEBUG_FIX_IGNORE_EOS_ADMISSION="0")
    assert state_of("ignore-eos-admission") == "off"
