"""A bug of ours in the words or the proof of one finding hides no finding and disarms nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import releases
import torch
from real_backend import PAGE, WINDOW, Rig
from served_rows import ARMED, Serving

from g4debug import plugin
from g4debug.dumps import reading
from g4debug.ledger.ledger import DOUBTS
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.pool_leak.tracer import PoolLeakTracer
from g4debug.tracers.prefix_cache import check as prefix_check
from g4debug.tracers.prefix_cache.digests import of_pages
from g4debug.tracers.prefix_cache.tracer import PrefixCacheTracer, Prompt
from g4debug.tracers.spec_lifecycle.check import Violation
from g4debug.tracers.spec_lifecycle.log import SpecLog
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap, TrapError

ALLOCATOR, PREFIX = "g4debug.tracers.kv_allocator", "g4debug.tracers.prefix_cache.tracer"


def fails(*args, **kwargs):
    raise ValueError("a bug of ours")


def dumped(folder):
    return [reading.read(path).finding for path in sorted(folder.glob("*.pt"))]


def freed(rig, request, times=2):
    row = rig.req_to_token.req_to_token[releases.kv_of(request).req_pool_idx]
    for _ in range(times):
        rig.allocator.free(row[: request.tokens].to(torch.int64))


def in_few_words(finding, kind, *words):
    """What it says although it could not be described."""
    assert (finding.check + ": " + finding.kind) == kind
    assert all(word in finding.headline and word in finding.got for word in words)
    assert "could not describe" in finding.expected
    assert "please report it" in finding.cause
    assert finding.reference.startswith("TRIAGE.md, '")
    return finding


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_an_allocator_finding_that_cannot_be_described(arm, monkeypatch, caplog, mode):
    folder = arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE=mode)
    rig, ledger = Rig(), plugin.in_force.ledger
    a = rig.admit("a", 3 * PAGE)
    monkeypatch.setattr(f"{ALLOCATOR}.report.cause", fails)
    if mode == "raise":
        with pytest.raises(TrapError):
            freed(rig, a)
    else:
        freed(rig, a)
    first, *_ = dumped(folder)
    in_few_words(first, "kv-allocator: double-free", "pages ")
    assert "a finding cannot be described in full" in caplog.text
    assert "a bug of ours" in caplog.text
    assert not ledger.broken


def test_an_allocator_finding_that_cannot_be_confirmed(arm, monkeypatch, caplog):
    """Nothing is told of these pages, and the next bad free is told all the same."""
    folder = arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE="log")
    rig, ledger = Rig(), plugin.in_force.ledger
    a, b = rig.admit("a", 3 * PAGE), rig.admit("b", 3 * PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(f"{ALLOCATOR}.tracer.is_real", fails)
        freed(rig, a)
    assert not dumped(folder)
    assert not ledger.broken
    assert "ValueError: a bug of ours" in caplog.text
    assert "nothing is told of a page" in ledger.status.record().limits[0].what
    freed(rig, b)
    assert {f.kind for f in dumped(folder)} == {"double-free"}


def test_a_ledger_that_can_ask_nobody_is_given_up(arm):
    arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE="log")
    Rig()
    ledger = plugin.in_force.ledger
    for _ in range(DOUBTS):
        ledger.unasked("full", np.array([3]), "page 3", ValueError("a bug of ours"))
        assert not ledger.broken
    ledger.unasked("full", np.array([3]), "page 3", ValueError("a bug of ours"))
    assert "could not be asked (now about page 3): ValueError: a bug of ours" in ledger.broken


def test_a_record_that_cannot_be_confirmed(arm, monkeypatch, caplog):
    folder = arm(**ARMED, G4DEBUG_MODE="log")
    it = Serving()
    it.write("b", 5, it.rig.page("a", 1))
    with monkeypatch.context() as patch:
        for tracer in ("page_table", "kv_writes"):
            patch.setattr(f"g4debug.tracers.{tracer}.confirm.misplaced", fails)
        it.forward()
    assert not dumped(folder)
    assert not it.ledger.broken
    assert "a bug of ours" in caplog.text
    it.write("b", 4, it.rig.page("a", 2))
    it.forward()
    assert "foreign-page" in {f.kind for f in dumped(folder)}


def test_a_finding_of_the_prefix_cache(tmp_path, monkeypatch):
    context = Context.alone(
        "prefix-cache", Settings(debug=True, mode="log", debug_dir=tmp_path), ledger=True
    )
    tracer = PrefixCacheTracer(context)
    prompt = Prompt(of_pages([1] * 32, 2, 16, 0, None), SimpleNamespace(rid="r"))
    tree = SimpleNamespace(page_size=16)
    found = prefix_check.Violation("twice", 1, 7, "")
    monkeypatch.setattr(f"{PREFIX}.describe", fails)
    tracer._tell(tree, found, prompt)
    in_few_words(*dumped(tmp_path), "prefix-cache: twice", "full page 7", "request r")

    monkeypatch.setattr(f"{PREFIX}.is_real", fails)
    assert not tracer._confirmed(tree, found, prompt)
    assert "cannot be asked" in context.status.record().limits[0].what


def test_a_finding_of_a_speculative_step(tmp_path, monkeypatch):
    context = Context.alone("spec-lifecycle", Settings(debug=True, mode="log", debug_dir=tmp_path))
    monkeypatch.setattr("g4debug.tracers.spec_lifecycle.report.causes.cause", fails)
    found = Violation("bonus-token", "the token as of the draft", "another token", 0)
    SpecLog(context).judge("worker.draft", None, found, ["r"])
    in_few_words(*dumped(tmp_path), "spec-lifecycle: bonus-token", "got another token")


def test_a_lost_page(arm, monkeypatch):
    folder = arm(G4DEBUG_TRACE="pool-leak", G4DEBUG_MODE="log")
    recorder, settings = plugin.in_force.recorder, Settings(mode="log", debug_dir=folder)
    trap = Trap(settings, Describer(recorder))
    context = Context(
        "pool-leak", plugin.in_force.hooks, settings, recorder, trap, plugin.in_force.ledger
    )
    rig = Rig()
    tracer = PoolLeakTracer(context)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=rig.allocator, req_to_token_pool=rig.req_to_token,
        tree_cache=releases.prefix_cache(rig.req_to_token, rig.allocator, PAGE, WINDOW),
        server_args=SimpleNamespace(speculative_eagle_topk=1), is_fully_idle=lambda: True,
    )  # fmt: skip
    monkeypatch.setattr("g4debug.tracers.pool_leak.report.cause", fails)
    monkeypatch.setattr("g4debug.tracers.pool_leak.report._by_owner", fails)
    tracer.check(scheduler, idle=True)
    assert "pool-leak: leaked" in {f"{f.check}: {f.kind}" for f in dumped(folder)}
    in_few_words(dumped(folder)[0], "pool-leak: leaked", "full pages")
