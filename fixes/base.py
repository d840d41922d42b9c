"""What a fix or performance path declares, and how its state is decided.

The file of a fix imports neither torch nor sglang at module level, because the settings read every
``FIX``, also where SGLang is not installed. ``still_broken()`` takes no argument. It reads SGLang's
*source* with :func:`g4debug.fixes.source.source`; it does not ask for the version, and it imports
nothing of SGLang::

    def still_broken() -> bool:
        return "if key is not None" not in source("sglang.srt.layers.radix_attention.some_function")

So it works for the installed SGLang and, inside ``targets.looking_at``, also for a wheel that is
only unpacked: in that way ``make versions`` finds the state of every fix on every release.
``apply`` only registers wrappers on ``hooks``; SGLang is imported inside the wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from g4debug import discovery
from g4debug.fixes import source
from g4debug.hooking import targets
from g4debug.hooking.hooks import HookError
from g4debug.settings import SettingsError, fix_switch

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks

State = Literal["applied", "not-needed", "off", "target-missing"]


@dataclass(frozen=True)
class Fix:
    """One fix or performance path, declared as ``FIX`` in its file.

    seed: the pull request that it implements. upstream: the thread in which SGLang fixed it. needs:
    the SGLang versions that it was written for. still_broken: whether the code of this SGLang has
    the bug. apply: puts the wrappers on the hooks. switch: the variable that the seed documents, or
    ''; it works beside ``G4DEBUG_FIX_<ID>``. default: False means off by default, so that it is
    applied only if somebody switches it on. eligible: where a performance path runs (elsewhere
    SGLang's own code does); '' for a fix.
    """

    id: str
    title: str
    seed: str
    upstream: str
    needs: str
    still_broken: Callable[[], bool]
    apply: Callable[[Hooks], None]
    switch: str = ""
    default: bool = True
    eligible: str = ""


@dataclass(frozen=True)
class FixState:
    fix: Fix
    state: State
    why: str

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"


_in_force: dict[str, FixState] = {}  # the states in this process, by id


def state_of(fix_id: str) -> State | None:
    """The state of a fix in this process; None before :func:`apply_all` ran."""
    found = _in_force.get(fix_id)
    return found.state if found is not None else None


def apply_all(
    hooks: Hooks,
    switches: Mapping[str, bool],
    recreated: Mapping[str, str],
    forced_by: Mapping[str, str] | None = None,
) -> tuple[FixState, ...]:
    """Decide the state of every fix, and apply those that are needed.

    switches: the fixes that the environment forces on or off. forced_by: fix id -> the variable
    that forces it (default: the fix's own). recreated: fix id -> the fault that puts the bug back,
    so that the fix is needed again. Raises SettingsError if a fix is forced on that was not written
    for this SGLang, or that cannot be applied to it.
    """
    fixes = (discovery.load("fix", name) for name in discovery.names("fix"))
    states = tuple(_apply(fix, hooks, switches, recreated, forced_by or {}) for fix in fixes)
    _in_force.update({state.fix.id: state for state in states})
    return states


def _apply(
    fix: Fix,
    hooks: Hooks,
    switches: Mapping[str, bool],
    recreated: Mapping[str, str],
    forced_by: Mapping[str, str] | None = None,
) -> FixState:
    own = fix_switch(fix.id)
    switch = (forced_by or {}).get(fix.id, own)
    forced = switches.get(fix.id)
    if forced is False:
        return FixState(fix, "off", f"{switch}=0")
    found = targets.sglang_version()
    if not targets.matches(fix.needs):
        text = f"written for SGLang {fix.needs}, found {found or 'none'}"
        if forced:
            raise SettingsError(f"{switch}=1: fix {fix.id} was {text}; unset {switch}")
        return FixState(fix, "not-needed", text)
    off = FixState(fix, "off", f"off by default; {own}=1 turns it on")
    if forced:
        why = f"{switch}=1" + (f"; runs {fix.eligible}" if fix.eligible else "")
    elif fix.id in recreated and fix.default:
        why = f"fault {recreated[fix.id]} puts the bug back"
    else:
        try:
            broken = fix.still_broken()
        except Exception as e:  # in an unknown SGLang anything may go wrong
            if not fix.default:
                return off
            return FixState(fix, "target-missing", f"{type(e).__name__}: {e}")
        if not broken:
            lacks = "has such a path itself" if fix.eligible else "does not have this bug"
            return FixState(fix, "not-needed", f"the installed SGLang {lacks}")
        if not fix.default:
            return off
        why = f"runs {fix.eligible}" if fix.eligible else "the installed SGLang has this bug"
    try:
        fix.apply(hooks)
        _check_sites(fix, hooks)
    except HookError as e:
        hooks.drop(fix.id)
        if forced:
            raise SettingsError(f"{switch}=1: {e}") from e
        return FixState(fix, "target-missing", str(e))
    return FixState(fix, "applied", why)


def _check_sites(fix: Fix, hooks: Hooks) -> None:
    """Raise HookError if SGLang lacks a place that the fix wraps.

    If this is found here, before SGLang applies the hooks, only this fix is left out. If the audit
    found it afterwards, the server would have to stop.
    """
    for site in hooks.sites_of(fix.id):
        dotted = targets.path(site)
        if dotted is not None and not source.exists(dotted):
            raise HookError(
                f"{fix.id}: SGLang {targets.sglang_version()} has no {dotted} ({site}); "
                "run: g4debug doctor"
            )
