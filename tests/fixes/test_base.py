"""How a fix's state is decided."""

from __future__ import annotations

import dataclasses

import pytest
import releases
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from g4debug import discovery
from g4debug.fixes import base
from g4debug.fixes.base import Fix
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks, Order
from g4debug.settings import SettingsError

pytestmark = pytest.mark.skipif(targets.sglang_version() is None, reason="needs sglang")
SWITCH = "G4DEBUG_FIX_SWA_STATE_SWAP"


@pytest.fixture
def only(monkeypatch):
    """``only(fix)``: the folder of fixes holds this one."""

    def replace(mine):
        monkeypatch.setattr(discovery, "names", lambda package: (mine.id,))
        monkeypatch.setattr(discovery, "load", lambda *a: mine)

    return replace


def fix(broken=True, needs=">=0.5", applied=None, purpose="correctness", **more):
    def probe():
        if isinstance(broken, Exception):
            raise broken
        return broken

    def hooks():
        if applied is not None:
            applied.append("the hooks")
        return ()

    return Fix(
        id="swa-state-swap",
        title="t",
        seed="s",
        upstream="u",
        needs=needs,
        still_broken=probe,
        hooks=hooks,
        purpose=purpose,
        **more,
    )


FAULT = {"swa-state-swap": "stale-swa-state"}


@pytest.mark.parametrize(
    ("broken", "needs", "switches", "recreated", "state", "why"),
    [
        (True, ">=0.5", {}, {}, "applied", "has this bug"),
        (False, ">=0.5", {}, {}, "not-needed", "does not have this bug"),
        (False, ">=0.5", {}, FAULT, "applied", "fault stale-swa-state puts the bug back"),
        (False, ">=0.5", {"swa-state-swap": True}, {}, "applied", f"{SWITCH}=1"),
        (True, ">=0.5", {"swa-state-swap": False}, {}, "off", f"{SWITCH}=0"),
        (True, ">=0.5", {"swa-state-swap": False}, FAULT, "off", f"{SWITCH}=0"),
        (True, ">=99", {}, {}, "not-needed", "written for SGLang >=99, found"),
        (True, ">=99", {}, FAULT, "not-needed", "written for SGLang >=99"),
        (AttributeError("gone"), ">=0.5", {}, {}, "target-missing", "AttributeError: gone"),
        (ImportError("gone"), ">=0.5", {}, {}, "target-missing", "ImportError: gone"),
        (TypeError("other"), ">=0.5", {}, {}, "target-missing", "TypeError: other"),
        (OSError("no source"), ">=0.5", {}, {}, "target-missing", "OSError: no source"),
        (IndentationError("odd"), ">=0.5", {}, {}, "target-missing", "IndentationError: odd"),
    ],
)
def test_states(only, broken, needs, switches, recreated, state, why):
    applied = []
    mine = fix(broken, needs, applied)
    only(mine)
    (got,) = base.apply_all(Hooks(), switches, recreated)
    assert got.state == state
    assert why in got.why
    assert str(got) == f"{state}: {got.why}"
    assert applied == (["the hooks"] if state == "applied" else [])


def test_a_fix_that_is_forced_on_where_it_was_not_written_for_is_refused(only):
    mine = fix(needs=">=99")
    only(mine)
    with pytest.raises(SettingsError, match=f"{SWITCH}=1: .* written for SGLang >=99, found"):
        base.apply_all(Hooks(), {"swa-state-swap": True}, {})


@pytest.mark.parametrize(
    ("needs", "switches", "recreated", "state", "why"),
    [
        (">=0.5", {}, {}, "off", f"off by default; {SWITCH}=1 turns it on"),
        (">=0.5", {}, FAULT, "off", "off by default"),
        (">=0.5", {"swa-state-swap": False}, {}, "off", "SGLANG_X=0"),
        (">=0.5", {"swa-state-swap": True}, {}, "applied", "SGLANG_X=1"),
        (">=99", {}, {}, "not-needed", "written for SGLang >=99, found"),
    ],
)
def test_a_fix_that_is_shipped_off(only, needs, switches, recreated, state, why):
    applied = []
    mine = fix(True, needs, applied, purpose="experiment", switch="SGLANG_X")
    only(mine)
    forced_by = {"swa-state-swap": "SGLANG_X"}
    (got,) = base.apply_all(Hooks(), switches, recreated, forced_by)
    assert (got.state, bool(applied)) == (state, state == "applied")
    assert why in got.why


def test_a_refusal_names_the_variable_that_was_set(only):
    mine = fix(needs=">=99", switch="SGLANG_X")
    only(mine)
    with pytest.raises(SettingsError, match=r"^SGLANG_X=1: .*; unset SGLANG_X$"):
        base.apply_all(Hooks(), {mine.id: True}, {}, {mine.id: "SGLANG_X"})


def test_a_place_that_an_unknown_sglang_lacks_costs_this_fix_only(only, monkeypatch):
    """The table of targets says where; the code is asked before SGLang would be hooked."""
    backend = "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"
    monkeypatch.setitem(targets.SITES, "attn.trtllm_mha.init", (("", f"{backend}.renamed"),))

    sites = ("scheduler.run_batch", "attn.trtllm_mha.init")
    mine = dataclasses.replace(fix(), hooks=[base.after(s, lambda r, *a: r) for s in sites])
    only(mine)
    hooks = Hooks()
    hooks.after("scheduler.run_batch", Order.TRACER, "somebody", lambda r, *a: r)
    (got,) = base.apply_all(hooks, {}, {})
    assert got.state == "target-missing"
    assert f"has no {backend}.renamed (attn.trtllm_mha.init)" in got.why
    assert hooks.sites == ("scheduler.run_batch",)
    assert hooks.owners("scheduler.run_batch") == ("somebody",)
    with pytest.raises(SettingsError, match=f"{SWITCH}=1: .*renamed"):
        base.apply_all(Hooks(), {mine.id: True}, {})


def test_every_fix_has_its_papers():
    names = discovery.names("fix")
    assert len(names) > 10
    for name in names:
        declared = discovery.load("fix", name)
        papers = dataclasses.asdict(declared)
        del papers["switch"], papers["eligible"], papers["elsewhere"]  # may be empty
        for value in papers.values():
            assert value
        for part in (*declared.needs.split(" or "), *declared.elsewhere):
            assert SpecifierSet(part)
        assert all(why and not why.endswith(".") for why in declared.elsewhere.values())


def test_no_performance_path_is_for_a_release_that_is_not_there_yet():
    """It was never run there, and what it must not change may have moved."""
    newest = releases.newest()
    to_come = Version(f"{newest.major}.{newest.minor}.{newest.micro + 1}")
    fixes = [discovery.load("fix", name) for name in discovery.names("fix")]
    open_ended = [f.id for f in fixes if f.eligible and targets.matches(f.needs, to_come)]
    assert not open_ended


def test_a_performance_path_says_where_it_runs_not_that_sglang_is_broken():
    from g4debug.fixes import locked_prefix

    fix = dataclasses.replace(
        locked_prefix.FIX, eligible="on every third Tuesday", needs=">=0", purpose="performance"
    )
    applied = dataclasses.replace(fix, still_broken=lambda: True, hooks=())
    wanted = base._apply(applied, Hooks(), {}, {}, mode="all")
    assert str(wanted) == "applied: G4DEBUG_FIXES=all; runs on every third Tuesday"
    forced = base._apply(applied, Hooks(), {fix.id: True}, {})
    assert str(forced).endswith("=1; runs on every third Tuesday")
    lacking = dataclasses.replace(fix, still_broken=lambda: False)
    state = base._apply(lacking, Hooks(), {}, {}, mode="all")
    assert str(state) == "not-needed: the installed SGLang has such a path itself"


def test_a_fix_whose_site_is_absent_leaves_nothing_behind(monkeypatch):
    """Half a fix is worse than none: what it had hooked before it failed is dropped."""
    from g4debug.fixes import swa_state_swap
    from g4debug.settings import SettingsError

    monkeypatch.setitem(targets.SITES, "attn.trtllm_mha.alloc_swa_page_table", (("", None),))
    fix = dataclasses.replace(swa_state_swap.FIX, still_broken=lambda: True)
    hooks = Hooks()
    state = base._apply(fix, hooks, {}, {})
    assert state.state == "target-missing"
    assert "attn.trtllm_mha.alloc_swa_page_table" in state.why
    assert hooks.sites == ()
    with pytest.raises(SettingsError, match=f"{SWITCH}=1: "):
        base._apply(fix, Hooks(), {fix.id: True}, {})


ONE, ALL, NONE = f"{SWITCH}=1 turns it on", "G4DEBUG_FIXES=all", "G4DEBUG_FIXES=none"


@pytest.mark.parametrize(
    ("purpose", "more", "mode", "state", "why", "added_by"),
    [
        ("correctness", {}, "needed", "applied", "the installed SGLang has this bug", ""),
        ("correctness", {}, "all", "applied", "the installed SGLang has this bug", ""),
        ("correctness", {}, "none", "off", f"{NONE}; {ONE}", "needed"),
        ("performance", {}, "needed", "off", f"it changes a default of SGLang; {ALL} or {ONE}",
         "all"),
        ("performance", {"eligible": "here"}, "needed", "off",
         f"a performance path; {ALL} or {ONE}", "all"),
        ("performance", {"eligible": "here"}, "none", "off", f"a performance path; {ALL} or {ONE}",
         "all"),
        ("performance", {"eligible": "here"}, "all", "applied", f"{ALL}; runs here", ""),
        ("performance", {}, "all", "applied", ALL, ""),
        ("experiment", {}, "all", "off", f"off by default; {ONE}", ""),
    ],
)  # fmt: skip
def test_the_mode_decides_by_the_purpose(only, purpose, more, mode, state, why, added_by):
    applied = []
    only(fix(applied=applied, purpose=purpose, **more))
    (got,) = base.apply_all(Hooks(), {}, {}, mode=mode)
    assert (got.state, got.why, got.added_by) == (state, why, added_by)
    assert bool(applied) == (state == "applied")


@pytest.mark.parametrize("mode", ["none", "needed", "all"])
@pytest.mark.parametrize("purpose", ["correctness", "performance", "experiment"])
def test_the_switch_of_a_fix_wins_over_the_mode(only, purpose, mode):
    only(fix(purpose=purpose))
    for value, state in ((True, "applied"), (False, "off")):
        (got,) = base.apply_all(Hooks(), {"swa-state-swap": value}, {}, mode=mode)
        assert (got.state, got.why) == (state, f"{SWITCH}={value:d}")


def test_none_leaves_a_bug_that_a_fault_puts_back(only):
    only(fix(broken=False))
    (got,) = base.apply_all(Hooks(), {}, FAULT, mode="none")
    assert (got.state, got.added_by) == ("off", "needed")


@pytest.mark.parametrize("mode", ["none", "needed"])
def test_what_is_not_wanted_is_not_missed(only, mode):
    only(fix(broken=AttributeError("gone"), purpose="performance"))
    (got,) = base.apply_all(Hooks(), {}, {}, mode=mode)
    assert (got.state, got.added_by) == ("off", "")


def test_what_mends_and_what_makes_faster():
    """A new fix has to be put on one of these lists by somebody who has thought about it."""
    found = {name: discovery.load("fix", name) for name in discovery.names("fix")}
    by = {
        p: {n for n, f in found.items() if f.purpose == p}
        for p in ("correctness", "performance", "experiment")
    }
    assert by["correctness"] == {
        "draft-embedding-shard", "draft-window", "hybrid-pool-swap", "idle-admission",
        "idle-draft-input", "ignore-eos-admission", "last-decode", "locked-prefix", "optional-kv",
        "parked-chunk", "residual-aliasing", "result-fence", "shared-kv-graphs",
        "spec-batch-guards", "swa-state-swap",
    }  # fmt: skip
    assert by["experiment"] == {
        "force-eagle", "frozen-kv-mtp-v2", "mm-piecewise-graph", "page-clamp",
        "triton-decode-window",
    }  # fmt: skip
    # A path that refuses requests is one that nobody gets without asking for it by name.
    by_name = {"frozen-kv-mtp-v2"}
    paths = {n for n, f in found.items() if f.eligible} - by_name
    assert by["performance"] == paths | {"swa-ratio"}
    assert set.union(*by.values()) == set(found)


def test_the_summary_says_what_is_in_force_and_what_all_would_add():
    states = base.apply_all(Hooks(), {}, {})
    on = sorted(s.fix.id for s in states if s.state == "applied")
    said = base.summary(states, "needed")
    assert said.startswith(f"{len(on)} in force ({', '.join(on)})")
    paths = sum(s.added_by == "all" and bool(s.fix.eligible) for s in states)
    if paths > 1:
        assert f"; G4DEBUG_FIXES=all would add {paths} performance paths" in said
    every = base.summary(base.apply_all(Hooks(), {}, {}, mode="all"), "all")
    assert "would add" not in every
    none = base.summary(base.apply_all(Hooks(), {}, {}, mode="none"), "none")
    assert none.startswith("none in force")
    assert ("leaves out" in none) is bool(on)
