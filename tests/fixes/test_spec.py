"""How a fix's state is decided."""

from __future__ import annotations

import dataclasses

import pytest
from g4debug.fixes import _spec
from g4debug.fixes._spec import Fix
from packaging.specifiers import SpecifierSet

from g4debug import discovery, targets
from g4debug.hooks import Hooks
from g4debug.settings import SettingsError

SWITCH = "G4DEBUG_FIX_SWA_STATE_SWAP"


def fix(broken=True, needs=">=0.5", applied=None):
    def probe():
        if isinstance(broken, Exception):
            raise broken
        return broken

    return Fix(
        id="swa-state-swap",
        title="t",
        seed="s",
        upstream="u",
        needs=needs,
        still_broken=probe,
        apply=lambda hooks: applied.append(hooks) if applied is not None else None,
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
        (OSError("no source"), ">=0.5", {}, {}, "target-missing", "OSError: no source"),
    ],
)
def test_states(monkeypatch, broken, needs, switches, recreated, state, why):
    if targets.sglang_version() is None:
        pytest.skip("needs sglang")
    applied = []
    mine = fix(broken, needs, applied)
    monkeypatch.setattr(discovery, "load", lambda *a: mine)
    hooks = Hooks()
    (got,) = _spec.apply_all(hooks, switches, recreated)
    assert got.state == state
    assert why in got.why
    assert str(got) == f"{state}: {got.why}"
    assert applied == ([hooks] if state == "applied" else [])


def test_a_fix_that_is_forced_on_where_it_was_not_written_for_is_refused(monkeypatch):
    mine = fix(needs=">=99")
    monkeypatch.setattr(discovery, "load", lambda *a: mine)
    with pytest.raises(SettingsError, match=f"{SWITCH}=1: .* written for SGLang >=99, found"):
        _spec.apply_all(Hooks(), {"swa-state-swap": True}, {})


def test_every_fix_has_its_papers():
    for name in discovery.names("g4debug.fixes"):
        declared = discovery.load("g4debug.fixes", name, "FIX")
        for value in dataclasses.asdict(declared).values():
            assert value
        assert SpecifierSet(declared.needs)


def test_a_fix_whose_site_is_absent_leaves_nothing_behind(monkeypatch):
    """Half a fix is worse than none: what it had hooked before it failed is dropped."""
    from g4debug.fixes import swa_state_swap

    from g4debug.settings import SettingsError

    monkeypatch.setitem(targets.SITES, "attn.alloc_swa_page_table", (("", None),))
    fix = dataclasses.replace(swa_state_swap.FIX, still_broken=lambda: True)
    hooks = Hooks()
    state = _spec._apply(fix, hooks, {}, {})
    assert state.state == "target-missing"
    assert "attn.alloc_swa_page_table" in state.why
    assert hooks.sites == ()
    with pytest.raises(SettingsError, match=f"{SWITCH}=1: "):
        _spec._apply(fix, Hooks(), {fix.id: True}, {})
