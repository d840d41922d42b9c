"""A fault that can never fire in this server is told at its start, with what the server lacks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from g4debug import discovery, speculation
from g4debug.combinations import seen
from g4debug.combinations.seen import Combination
from g4debug.faults.fitting import idle, install, what_it_has, what_runs

FAULT = discovery.load("fault", "page-oob")
LLAMA = Combination(
    "Llama", seen.MHA, seen.NO_WINDOW, "MHATokenToKVPool", ("trtllm_mha",), seen.NO_DRAFT
)
LISTS = replace(LLAMA, backends=("fa3", "triton"))
GEMMA = replace(LLAMA, window=seen.SWA_POOL, pool="SWAKVPool of A", draft="FROZEN_KV_MTP")


@pytest.mark.parametrize(
    ("asks", "ranks", "found", "lacks"),
    [
        (("a draft",), 1, LLAMA, "draft"),
        (("a draft", "a SWA pool"), 1, LLAMA, "draft and no SWA pool"),
        (("a draft", "a SWA pool", "page tables"), 1, GEMMA, ""),
        (("page tables",), 1, LLAMA, ""),
        (("page tables",), 1, replace(LLAMA, backends=("triton",)), "page tables"),
        (("page tables",), 1, replace(LLAMA, backends=("torch_native",)), "page tables"),
        (("a draft", "a SWA pool", "page tables"), 1, Combination(), ""),  # nothing is known
        (("lists of tokens",), 1, LLAMA, "lists of tokens"),
        (("lists of tokens",), 1, replace(LLAMA, backends=("torch_native",)), "lists of tokens"),
        (("lists of tokens",), 1, LISTS, ""),
        (("a draft model",), 1, LLAMA, "draft model"),
        (("a draft model",), 1, replace(LLAMA, draft="DFLASH"), ""),  # nobody knows
        (("a draft model", "a draft that reads the target's KV"), 1, GEMMA, ""),
        ((), 2, GEMMA, "2 tensor-parallel ranks"),
    ],
)
def test_what_a_server_lacks(sglang, asks, ranks, found, lacks):
    told = dict(idle([replace(FAULT, asks=asks, ranks=ranks)], what_runs(found), ranks=1))
    assert told == ({FAULT.id: lacks} if lacks else {})


def test_it_is_told_when_the_scheduler_is_there(sglang, caplog, monkeypatch):
    from g4debug.faults import base
    from g4debug.faults.grammar import parse
    from g4debug.hooking.hooks import Hooks

    hooks = Hooks()
    install(base.install_all(parse("rank-divergence=on"), hooks), hooks)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(tp_size=1))
    (after,) = [e.after for e in hooks._entries["scheduler.init"] if e.after is not None]
    assert after("result", scheduler) == "result"
    assert caplog.messages == [
        "g4debug: the fault rank-divergence can never fire in this server, which has no 2 "
        "tensor-parallel ranks"
    ]


@pytest.mark.parametrize(
    ("draft", "never"),
    [
        ("FROZEN_KV_MTP", set()),
        ("EAGLE", {"draft-embedding-shard"}),
        ("EAGLE3", {"draft-embedding-shard"}),
        ("STANDALONE", {"draft-embedding-shard", "stale-hidden-state"}),
        (
            "NGRAM",
            {
                "draft-embedding-shard", "stale-hidden-state", "verify-result",
                "verify-input-left", "spec-info-wrong-type",
            },
        ),
    ],
)  # fmt: skip
def test_the_faults_of_a_draft_that_a_worker_cannot_have(sglang, draft, never):
    """Those that tests/cpu/test_drafts_engine.py leaves out of a worker's."""
    if draft not in {adapter.name for adapter in speculation.adapters()}:
        pytest.skip(f"the worker of {draft} is not known on this release")
    faults = [discovery.load("fault", name) for name in discovery.names("fault")]
    of_drafts = [f for f in faults if f.caught_by == ("spec-lifecycle",)]
    has = what_runs(replace(LLAMA, draft=draft, pool="SWAKVPool of A"))
    assert {fault for fault, _ in idle(of_drafts, has, ranks=2)} == never


@pytest.mark.parametrize("kept", [True, False])
def test_without_a_prefix_cache_its_faults_are_idle(sglang, kept):
    tree = SimpleNamespace(supports_prefix_sharing=lambda: kept, is_chunk_cache=lambda: not kept)
    scheduler = SimpleNamespace(tree_cache=tree, spec_algorithm=None)
    faults = [discovery.load("fault", name) for name in discovery.names("fault")]
    told = {f for f, _ in idle(faults, what_it_has(scheduler), ranks=2)}
    of_it = {"insert-too-long", "insert-wrong-page", "insert-other-key", "cached-page-alias"}
    assert (told & of_it) == (set() if kept else of_it)
    assert ({"lent-row-page", "prefix-freed", "radix-evict"} <= told) is not kept
