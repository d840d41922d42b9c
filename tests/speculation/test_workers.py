"""The adapters of the speculative workers: which server is whose, and what a step hands on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from g4debug import speculation
from g4debug.hooking import targets
from g4debug.settings import Settings
from g4debug.speculation import eagle, frozen_kv_mtp, multi_layer_eagle, ngram
from g4debug.tracers.spec_lifecycle.spec_info import fields_of, hidden_of, state_of

OTHERS = ("EAGLE", "EAGLE3", "NGRAM", "STANDALONE")


@pytest.fixture
def at(monkeypatch):
    """As if this release were installed."""

    def install(release: str | None) -> None:
        found = None if release is None else Version(release)
        monkeypatch.setattr(targets, "sglang_version", lambda: found)
        monkeypatch.setattr(eagle, "several_models", lambda: False)
        speculation.adapters.cache_clear()

    yield install
    speculation.adapters.cache_clear()


def spec(kind: str, **fields: object) -> object:
    return type(kind, (), fields)()


@pytest.mark.parametrize(
    ("release", "known"),
    [
        ("0.5.14", set()),
        ("0.5.15.post1", {"EAGLE", "EAGLE3", "STANDALONE"}),
        ("0.5.23", {*OTHERS, "multi-layer EAGLE"}),
    ],
)
def test_a_worker_is_known_on_the_releases_that_were_run(at, release, known):
    at(release)
    assert {adapter.name for adapter in speculation.adapters()} == {"FROZEN_KV_MTP", *known}


@pytest.mark.parametrize("installed", [None, "0.5.12.post1", "0.5.23"])
def test_what_was_replayed_hangs_on_the_dumps_release_alone(at, installed):
    at(installed)
    assert speculation.replayed("0.5.23") == {*OTHERS, "FROZEN_KV_MTP", "multi-layer EAGLE"}
    assert speculation.replayed("0.5.15.post1") == {"FROZEN_KV_MTP"}
    assert speculation.replayed("0.5.12.post1") == {"FROZEN_KV_MTP"}


def test_a_server_has_the_adapter_of_its_algorithm(sglang, at):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    at("0.5.23")
    for name in (*OTHERS, "FROZEN_KV_MTP"):
        if not hasattr(SpeculativeAlgorithm, name):
            continue  # of an older SGLang
        scheduler = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.from_string(name))
        assert speculation.of(scheduler).name == name
    none = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.from_string(None))
    assert speculation.of(none) is None


def test_one_model_for_each_step_is_another_worker(at, monkeypatch):
    at("0.5.23")
    monkeypatch.setattr(eagle, "several_models", lambda: True)
    algorithm = SimpleNamespace(name="EAGLE", is_frozen_kv_mtp=lambda: False)
    scheduler = SimpleNamespace(spec_algorithm=algorithm)
    assert speculation.of(scheduler).name == "multi-layer EAGLE"
    # Of the other algorithms it is not known.
    algorithm.name = "EAGLE3"
    assert speculation.of(scheduler) is None


def test_a_draft_with_several_models_has_several_pools(at, monkeypatch):
    """Each has the pages of the target's SWA pool; a part of a pool without a layer is no pool."""
    at("0.5.23")
    monkeypatch.setattr(eagle, "several_models", lambda: True)

    def inner(layers):
        return SimpleNamespace(k_buffer=[0] * layers, v_buffer=[0] * layers)

    pools = [SimpleNamespace(full_kv_pool=inner(0), swa_kv_pool=inner(1)) for _ in range(3)]
    runners = [SimpleNamespace(token_to_kv_pool=pool) for pool in pools]
    scheduler = SimpleNamespace(
        spec_algorithm=SimpleNamespace(name="EAGLE", is_frozen_kv_mtp=lambda: False),
        draft_worker=SimpleNamespace(
            draft_worker=SimpleNamespace(draft_runners=runners), primary_draft_kv_pool=pools[0]
        ),
    )
    assert speculation.draft_pools(scheduler) == tuple(pools)
    found = [(p.pool, p.pages, p.model) for p in speculation.draft_parts(scheduler)]
    assert found == [(pool.swa_kv_pool, "swa", i) for i, pool in enumerate(pools)]
    pools[1].full_kv_pool = inner(2)
    assert [p.pages for p in speculation.draft_parts(scheduler)] == ["swa", "full", "swa", "swa"]


def test_hidden_states_that_nobody_reads_are_no_row_of_a_request(at):
    """Behind a prefill, multi-layer EAGLE's draft input has those of all tokens."""
    at("0.5.23")
    draft = spec("EagleDraftInput", hidden_states=torch.zeros(7, 2))
    assert fields_of(draft, True) == ("bonus_tokens", "hidden_states")
    assert fields_of(draft, True, multi_layer_eagle.ADAPTER) == ("bonus_tokens",)
    assert hidden_of(draft, multi_layer_eagle.ADAPTER) is None
    assert hidden_of(draft, eagle.ADAPTER) is draft.hidden_states


def test_where_it_was_not_run_it_is_not_judged(at):
    at("0.5.23")
    raising = Settings(mode="raise")
    only_on_cpu = replace(eagle.ADAPTER, run={"0.5.23": (targets.CPU,)})
    assert only_on_cpu.is_judged(raising, on_cpu=True)
    assert not only_on_cpu.is_judged(raising, on_cpu=False)
    assert only_on_cpu.is_judged(Settings(mode="log"), on_cpu=False)
    assert only_on_cpu.is_judged(Settings(not_run_on_this_release=True), on_cpu=False)
    assert frozen_kv_mtp.ADAPTER.is_judged(raising, on_cpu=False)


def test_a_class_is_a_state_of_its_own_worker(at):
    """A frozen draft's verify makes an EagleDraftInput, which is no draft input of that worker."""
    at("0.5.23")
    draft = spec("EagleDraftInput", hidden_states=None)
    assert state_of(draft) == state_of(draft, eagle.ADAPTER) == "draft-input"
    assert state_of(draft, frozen_kv_mtp.ADAPTER) == "EagleDraftInput"
    assert state_of(spec("EagleDraftExtendInput"), eagle.ADAPTER) == "draft-extend-input"
    assert fields_of(draft, relayed=True) == ("bonus_tokens",)
    assert fields_of(draft, relayed=False) == ("bonus_tokens", "topk_p", "topk_index")


def test_one_class_of_ngram_is_draft_input_and_verify_input(at):
    at("0.5.23")
    draft = spec("NgramVerifyInput", draft_token=None)
    verify = spec("NgramVerifyInput", draft_token=torch.zeros(4))
    assert state_of(draft) == state_of(draft, ngram.ADAPTER) == "draft-input"
    assert state_of(verify) == state_of(verify, ngram.ADAPTER) == "verify-input"
    assert fields_of(draft, relayed=False) == ("accept_lens",)


def test_the_last_accepted_token_of_ngram():
    tokens, lens = torch.tensor([[5, 6, 0], [7, 0, 0], [1, 2, 3]]), torch.tensor([2, 1, 3])
    for shape in (tokens, tokens.flatten()):  # stashed, and in a draft input
        found = ngram.last_accepted(SimpleNamespace(accept_tokens=shape, accept_lens=lens))
        assert found.tolist() == [6, 7, 3]
    nothing = SimpleNamespace(accept_tokens=None, accept_lens=None)
    assert ngram.last_accepted(nothing) is None


@pytest.mark.parametrize(("name", "has"), [("EAGLE", True), ("NGRAM", False), ("OTHER", False)])
def test_the_pool_of_a_draft_that_writes_kv(at, name, has):
    at("0.5.23")
    scheduler = SimpleNamespace(
        spec_algorithm=SimpleNamespace(name=name, is_frozen_kv_mtp=lambda: False),
        draft_worker=SimpleNamespace(primary_draft_kv_pool="the pool"),
    )
    assert speculation.draft_pools(scheduler) == (("the pool",) if has else ())


def test_the_pool_of_a_draft_where_its_worker_does_not_name_it(at):
    """As on 0.5.15: it is the one of the draft's runner."""
    at("0.5.15.post1")
    runner = SimpleNamespace(token_to_kv_pool="the pool")
    scheduler = SimpleNamespace(
        spec_algorithm=SimpleNamespace(name="EAGLE", is_frozen_kv_mtp=lambda: False),
        draft_worker=SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=runner)),
    )
    assert speculation.draft_pools(scheduler) == ("the pool",)
