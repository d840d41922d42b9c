"""What becomes of our hooks while the server runs, on real SGLang with every tracer armed."""

from __future__ import annotations

import functools
import logging

import pytest
import releases

from g4debug import plugin
from g4debug.backends import adapters
from g4debug.dumps import reading
from g4debug.findings.record import Finding, Location
from g4debug.hooking import targets
from g4debug.hooking.plugins import Plugin
from g4debug.tracers import hook_watch
from g4debug.trapping.trap import TrapError

FIXES = (  # site, fix, name of the function
    ("model.capture_eagle3", "residual-aliasing", "set_eagle3_layers_to_capture"),
    ("attn.hybrid_init", "hybrid-pool-swap", "__init__"),
)


@pytest.fixture
def originals(sglang):
    """SGLang's own functions, as they were before anybody hooked them."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.models.gemma4_causal import Gemma4ForCausalLM

    return {
        (owner, name): owner.__dict__[name]
        for owner, name in (
            (ScheduleBatch, "merge_batch"),
            (ScheduleBatch, "_evict_swa"),
            (Scheduler, "run_batch"),
            (releases.allocator_class("pool.alloc_extend"), "alloc_extend"),
            (Gemma4ForCausalLM, "set_eagle3_layers_to_capture"),
            (HybridAttnBackend, "__init__"),
        )
    }


@pytest.fixture
def armed(originals, arm, caplog):
    arm(SGLANG_TRTLLM_MHA_DEBUG="1")
    caplog.set_level(logging.WARNING, "g4debug")
    caplog.clear()
    return plugin.in_force


def put_back(originals, name):
    for (owner, attribute), function in originals.items():
        if attribute == name:
            setattr(owner, attribute, function)


def wrap(originals, name):
    for owner, attribute in originals:
        if attribute == name:
            setattr(owner, name, over(getattr(owner, name)))


def over(inner):
    @functools.wraps(inner)
    def patched(*args, **kwargs):
        return inner(*args, **kwargs)

    return patched


def states(state):
    return {t.name: t for t in state.recorder.status.records()}


def finding(check="kv-allocator", kind="double-alloc"):
    return Finding(check, kind, "s", f"g4debug: {check} says {kind}", Location(), "e", "g")


def test_a_healthy_server_is_told_nothing(armed, caplog):
    for _ in range(3):
        armed.watch.look()
    assert caplog.text == ""
    assert all(not t.dead and not t.off and not t.limits for t in states(armed).values())
    assert all(t.audited == 0 for t in states(armed).values())


def test_a_hook_that_is_gone_is_told_once_and_stands_in_the_status(armed, originals, caplog):
    put_back(originals, "merge_batch")
    for _ in range(3):
        armed.watch.look()
    (line,) = caplog.messages
    assert line.startswith("g4debug: hooks do not run any more (1 of ")
    assert "batch.merge: ScheduleBatch.merge_batch (schedule_batch.py:" in line
    # A fix at the same place, which the releases with v2 do not need.
    fix = not armed.fixes["spec-batch-guards"].startswith("not-needed")
    blind = "spec-batch-guards, spec-lifecycle see" if fix else "spec-lifecycle sees"
    assert line.endswith(f"is there instead, so {blind} nothing there")
    lifecycle = states(armed)["spec-lifecycle"]
    assert not lifecycle.off
    assert lifecycle.dead[0].startswith("batch.merge: ScheduleBatch.merge_batch")
    assert "its hook does not run at batch.merge" in lifecycle.state
    assert states(armed)["page-table"].sound
    assert states(armed)["ledger"].sound
    if fix:
        assert armed.fixes["spec-batch-guards"] == (
            "removed: its hook at batch.merge does not run any more"
        )


def test_a_fix_whose_hook_is_gone_is_called_removed(armed, originals):
    """One that this release needs."""
    site, fix, function = next(x for x in FIXES if armed.fixes[x[1]].startswith("applied"))
    put_back(originals, function)
    armed.watch.look()
    assert armed.fixes[fix] == f"removed: its hook at {site} does not run any more"


def test_a_ledger_that_lost_a_hook_is_given_up_with_what_needs_it(armed, originals):
    put_back(originals, "alloc_extend")
    armed.watch.look()
    assert "its hook at pool.alloc_extend is gone" in armed.ledger.broken
    found = states(armed)
    assert found["ledger"].off
    assert "the page ledger is off" in found["kv-allocator"].off
    assert "the page ledger is off" in found["pool-leak"].limits[0].why
    assert found["page-table"].limits
    assert not found["page-table"].off
    assert found["spec-lifecycle"].sound


def test_the_step_counter_that_stands_still_is_told(armed, originals, caplog):
    put_back(originals, "run_batch")
    armed.watch.on_idle()
    assert caplog.messages == []  # it was looked at a moment ago
    armed.watch._looked_at = (-hook_watch.IDLE_SECONDS, 0)
    armed.watch.on_idle()
    assert ": scheduler.run_batch: Scheduler.run_batch (scheduler.py:" in caplog.text
    assert states(armed)["step-recorder"].dead


def test_it_is_looked_at_after_so_many_busy_steps(armed, originals, caplog):
    put_back(originals, "merge_batch")
    for _ in range(hook_watch.BUSY_STEPS - 1):
        armed.recorder.count()
        armed.watch.after_step(None)
    assert caplog.messages == []
    armed.recorder.count()
    armed.watch.after_step(None)
    assert len(caplog.messages) == 1


def test_a_tracer_without_any_hook_is_off(armed, originals, caplog):
    sites = armed.hooks.sites_of("spec-lifecycle")
    for site in sites:
        owner, name = _place(site)
        setattr(owner, name, getattr(owner, name).__wrapped__)
    armed.watch.look()
    assert states(armed)["spec-lifecycle"].off == "none of its hooks runs any more"
    assert f"g4debug: hooks do not run any more ({len(sites)} of " in caplog.messages[0]


def _place(site):
    import pkgutil

    parent, name = targets.path(site).rsplit(".", 1)
    return pkgutil.resolve_name(parent), name


def test_a_hook_that_is_back_is_told_and_stays_doubtful(armed, originals, caplog):
    ours = {key: key[0].__dict__[key[1]] for key in originals}
    put_back(originals, "merge_batch")
    armed.watch.look()
    put_back(ours, "merge_batch")
    armed.watch.look()
    assert "run again, but what happened meanwhile was missed: batch.merge" in caplog.text
    assert not states(armed)["spec-lifecycle"].dead
    assert "batch.merge" in armed.watch.doubt(finding("spec-lifecycle", "wrong-type"))


@pytest.mark.parametrize(
    ("name", "check", "kind", "believed"),
    [
        ("alloc_extend", "kv-allocator", "free-unallocated", False),
        ("alloc_extend", "pool-leak", "leaked", False),
        ("alloc_extend", "page-table", "use-after-free", False),
        ("alloc_extend", "page-table", "out-of-range", True),
        ("alloc_extend", "spec-lifecycle", "seq-len", True),
        ("merge_batch", "spec-lifecycle", "wrong-type", False),
        ("merge_batch", "kv-allocator", "double-alloc", True),
        ("run_batch", "spec-lifecycle", "seq-len", False),
        (None, "kv-allocator", "double-alloc", True),
    ],
)
def test_a_finding_of_a_tracer_that_missed_something_stops_no_server(
    armed, originals, caplog, tmp_path, name, check, kind, believed
):
    """It is looked at just before the finding is reported: nobody had noticed so far."""
    if name:
        put_back(originals, name)
    trap = _trap(armed)
    if believed:
        with pytest.raises(TrapError):
            trap.report(finding(check, kind))
        return
    for _ in range(3):
        trap.report(finding(check, kind))
    told = [m for m in caplog.messages if f"{check} says {kind}" in m]
    assert len(told) == 1
    assert told[0].startswith("g4debug: this is not reported, because hooks that it stands on were")
    assert not list(tmp_path.glob("dumps/*"))


def test_a_flood_of_findings_is_no_flood_of_looks(originals, arm, monkeypatch):
    arm(SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_MODE="log")
    watch = plugin.in_force.watch
    looks = []
    monkeypatch.setattr(watch, "look", lambda: looks.append(1))
    clock = [hook_watch.AGAIN_SECONDS + watch._looked_at[0]]
    monkeypatch.setattr(hook_watch.time, "monotonic", lambda: clock[0])
    for _ in range(3):
        watch.doubt(finding())
    assert len(looks) == 3  # ``look`` is replaced, so the last look stays as old as it is
    clock[0] -= hook_watch.AGAIN_SECONDS / 2
    for _ in range(1000):
        watch.doubt(finding())
    assert len(looks) == 3


def _trap(armed):
    """The trap of this process, which doubts through the watch."""
    return armed.watch.trap


def test_a_wrapper_outside_is_told_and_limits_where_it_can_change_what_is_checked(
    armed, originals, caplog
):
    armed.watch.plugins = (Plugin("timer", f"{__name__}:register", "timer 0", True),)
    wrap(originals, "merge_batch")
    wrap(originals, "alloc_extend")
    armed.watch.look()
    armed.watch.look()
    (line,) = caplog.messages[:1]
    assert "plugin timer at batch.merge: over.patched (test_hook_watch.py:" in line
    assert "plugin timer at pool.alloc_extend: " in line
    assert "wraps our hook, so its changes are not checked" in line
    found = states(armed)
    assert found["spec-lifecycle"].sound  # a wrapper there sees only what we see
    assert found["ledger"].limits[0].what == hook_watch.BEHIND
    assert "plugin timer wraps it at pool.alloc_extend" in found["ledger"].limits[0].why


@pytest.mark.parametrize("part", ["page-table", "kv-writes"])
@pytest.mark.parametrize("adapter", adapters(), ids=lambda a: a.name)
def test_a_wrapper_where_a_backend_hands_over_limits_who_looks_there(arm, caplog, adapter, part):
    arm(SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_TRACE=part)
    caplog.set_level(logging.WARNING, "g4debug")
    state = plugin.in_force
    looked_at = state.hooks.sites_of(part)
    handed = [s for s in (*adapter.sites, *adapter.fused_writes) if s in looked_at]
    for site in handed:
        owner, name = _place(site)
        setattr(owner, name, over(getattr(owner, name)))
    state.watch.look()
    told = {x.what: x.why for x in states(state)[part].limits}
    assert (hook_watch.BEHIND in told) is bool(handed)
    for site in handed:
        assert f" at {site}: over.patched (test_hook_watch.py:" in caplog.text


def test_the_dump_lists_the_plugins_and_who_is_at_our_sites(armed, originals, tmp_path):
    armed.watch.plugins = (Plugin("timer", f"{__name__}:register", "timer 0", True),)
    wrap(originals, "merge_batch")
    put_back(originals, "_evict_swa")
    with pytest.raises(TrapError) as caught:
        _trap(armed).report(finding("spec-lifecycle", "wrong-type"))
    record = reading.read(caught.value.path)
    assert record.plugins["g4debug"].startswith("allowed: g4debug.plugin:register")
    (other,) = record.others
    assert (other.site, other.side, other.who) == ("batch.merge", "outside", "plugin timer")
    allocator = next(t for t in record.tracers if t.name == "kv-allocator")
    assert allocator.dead[0].startswith("batch.evict_swa: ScheduleBatch._evict_swa")


@pytest.mark.parametrize("meddle", [wrap, put_back])
def test_nobody_vouches_for_what_was_taken_away_just_before_the_end(armed, originals, meddle):
    """The hooks are looked at before it is said who is innocent, not when the dump is written."""
    from g4debug.hooking.hooks import Order
    from g4debug.tracers.flight_recorder.tracer import LOOP

    for t in ("page-table", "kv-allocator", "ledger"):
        armed.recorder.status.part(t).checked(1, "tables" if t == "page-table" else "hand-outs")
    meddle(originals, "alloc_extend")
    loop = next(e for e in armed.hooks._entries[LOOP] if e.order is Order.LAST)

    def dies(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="CUDA error"):
        loop.around(dies, "scheduler")
    (path,) = armed.watch.trap.settings.debug_dir.glob("*.pt")
    cause = reading.read(path).finding.cause
    assert "Not looked at: " in cause
    assert ("it at pool.alloc_extend" in cause) is (meddle is wrap)
    assert ("its hook at pool.alloc_extend is gone" in cause) is (meddle is put_back)


def test_its_own_failure_costs_neither_finding_nor_dump(armed, monkeypatch, caplog):
    monkeypatch.setattr(armed.hooks, "look", lambda: 1 / 0)
    with pytest.raises(TrapError) as caught:
        _trap(armed).report(finding())
    assert reading.read(caught.value.path).others == ()
    assert "its hook doubt is off" in caplog.text


def test_nothing_is_imported_to_look(armed, originals, monkeypatch):
    import sys

    before = set(sys.modules)
    monkeypatch.setattr("builtins.__import__", lambda *a, **k: 1 / 0)
    armed.watch.look()
    monkeypatch.undo()
    assert set(sys.modules) == before


def test_a_look_visits_our_sites_only(armed, monkeypatch):
    """The cost of a look is bounded by the sites that are hooked, and nothing is looked into."""
    seen = []
    at = armed.hooks.at
    monkeypatch.setattr(armed.hooks, "at", lambda site: seen.append(site) or at(site))
    monkeypatch.setattr(hook_watch, "neighbours", lambda *a: 1 / 0)
    armed.watch.look()
    assert sorted(seen) == sorted(armed.hooks.sites)
