"""The declaration of a fix or performance path, and how its state is decided.

The file of a fix imports neither torch nor sglang at module level, because the settings read every
``FIX``, also where SGLang is not installed. ``still_broken()`` takes no argument. It reads SGLang's
*source* with :func:`g4debug.fixes.source.source`; it does not ask for the version, and it imports
nothing of SGLang::

    def still_broken() -> bool:
        return "if key is not None" not in source("sglang.srt.layers.radix_attention.some_function")

So it works for the installed SGLang and, inside ``targets.looking_at``, also for a wheel that is
only unpacked: in that way ``make versions`` finds the state of every fix on every release.
SGLang is imported inside the wrappers that are its ``hooks``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from g4debug import discovery
from g4debug.fixes import source
from g4debug.hooking import targets
from g4debug.hooking.hooks import HookError, Hooks, Order
from g4debug.settings import SettingsError, fix_switch

State = Literal["applied", "not-needed", "off", "target-missing"]
Purpose = Literal["correctness", "performance", "experiment"]


class Hook(NamedTuple):
    """A wrapper of a fix. way: the method of ``Hooks`` that takes the rest."""

    way: Literal["around", "before", "after"]
    site: str
    wrapper: Callable[..., Any]
    optional: bool = False


around, before, after = (partial(Hook, way) for way in ("around", "before", "after"))


@dataclass(frozen=True)
class Fix:
    """One fix or performance path, declared as ``FIX`` in its file.

    seed: the pull request that it implements. upstream: the thread in which SGLang fixed it. needs:
    the SGLang versions that it was written for, as in ``targets.matches``. elsewhere: why it is not
    for others: such a specifier -> the rest of "not on this release, because";
    the first that matches counts. still_broken: whether the code of this SGLang has
    the bug. hooks: its wrappers, or a function that returns them where they depend on the
    release or the settings. switch: the variable that the seed documents, or
    ''; it works beside ``G4DEBUG_FIX_<ID>``. eligible: where a performance path runs (elsewhere
    SGLang's own code does); '' for a fix.

    purpose: correctness mends a crash or a wrong result, and leaves a healthy server's outputs as
    they are, bit for bit. It is put in force by ``G4DEBUG_FIXES=needed``, the default. performance
    makes something faster or changes a default, and may change the outputs' last bits: only by
    ``all``. experiment mends nothing, refuses some servers, or changes what a healthy server
    answers: only by its own switch.
    """

    id: str
    title: str
    seed: str
    upstream: str
    needs: str
    still_broken: Callable[[], bool]
    hooks: Sequence[Hook] | Callable[[], Sequence[Hook]]
    purpose: Purpose
    switch: str = ""
    eligible: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_for_this_release(self) -> bool:
        """True if the fix was written for the installed SGLang."""
        return targets.matches(self.needs)

    def apply(self, hooks: Hooks) -> None:
        """Put the wrappers on. Raises HookError if this SGLang lacks a site that it needs."""
        for hook in self.hooks() if callable(self.hooks) else self.hooks:
            put = getattr(hooks, hook.way)
            put(hook.site, Order.FIX, self.id, hook.wrapper, optional=hook.optional)


@dataclass(frozen=True)
class FixState:
    """forced_off: somebody switched this one off. added_by: for one that is off otherwise, the
    value of ``G4DEBUG_FIXES`` that would apply it, or ''.
    """

    fix: Fix
    state: State
    why: str
    added_by: str = ""
    forced_off: bool = False

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
    mode: str = "needed",
) -> tuple[FixState, ...]:
    """Decide the state of every fix, and apply those that are wanted and needed.

    switches: the fixes that the environment forces on or off. forced_by: fix id -> the variable
    that forces it (default: the fix's own). recreated: fix id -> the fault that puts the bug back,
    so that the fix is needed again. mode: none, needed or all, of ``G4DEBUG_FIXES``. Raises
    SettingsError if a fix is forced on that was not written for this SGLang, or that cannot be
    applied to it.
    """
    fixes = (discovery.load("fix", name) for name in discovery.names("fix"))
    states = tuple(_apply(fix, hooks, switches, recreated, forced_by, mode) for fix in fixes)
    _in_force.update({state.fix.id: state for state in states})
    return states


def summary(states: Sequence[FixState], mode: str) -> str:
    """A short summary: the fixes in force, and those that another mode would add."""
    on = [s.fix.id for s in states if s.state == "applied"]
    said = f"{len(on)} in force ({', '.join(on)})" if on else "none in force"
    missing = [s.fix.id for s in states if s.state == "target-missing"]
    if missing:
        said += f"; {len(missing)} target-missing ({', '.join(missing)})"
    killed = sum(s.forced_off for s in states)
    if killed:
        said += f"; {killed} switched off"
    if mode == "none":
        left = [s.fix.id for s in states if s.added_by == "needed"]
        if left:
            said += f"; G4DEBUG_FIXES=none leaves out {len(left)} that this SGLang needs"
        return said
    added = [s.fix for s in states if s.added_by == "all"]
    paths = sum(bool(fix.eligible) for fix in added)
    would = [f"{paths} performance path{'s' * (paths > 1)}"] if paths else []
    would += [fix.id for fix in added if not fix.eligible]
    return said + (f"; G4DEBUG_FIXES=all would add {' and '.join(would)}" if would else "")


def _apply(
    fix: Fix,
    hooks: Hooks,
    switches: Mapping[str, bool],
    recreated: Mapping[str, str],
    forced_by: Mapping[str, str] | None = None,
    mode: str = "needed",
) -> FixState:
    own = fix_switch(fix.id)
    switch = (forced_by or {}).get(fix.id, own)
    forced = switches.get(fix.id)
    if forced is False:
        return FixState(fix, "off", f"{switch}=0", forced_off=True)
    found = targets.sglang_version()
    if not fix.is_for_this_release:
        text = f"written for SGLang {fix.needs}, found {found or 'none'}"
        why = next((why for other, why in fix.elsewhere.items() if targets.matches(other)), "")
        if forced:
            because = f": {why}" if why else ""
            raise SettingsError(f"{switch}=1: fix {fix.id} was {text}{because}; unset {switch}")
        said = f"not on this release, because {why}" if why else text
        return FixState(fix, "not-needed", said)
    off = None if forced else _unwanted(fix, mode)
    if forced:
        why = f"{switch}=1" + (f"; runs {fix.eligible}" if fix.eligible else "")
    elif fix.id in recreated and fix.purpose == "correctness":
        if off is not None:
            return off
        why = f"fault {recreated[fix.id]} puts the bug back"
    else:
        try:
            broken = fix.still_broken()
        except Exception as e:  # in an unknown SGLang anything may go wrong
            if off is not None:
                return replace(off, added_by="")  # another mode would not find it either
            return FixState(fix, "target-missing", f"{type(e).__name__}: {e}")
        if not broken:
            lacks = "has such a path itself" if fix.eligible else "does not have this bug"
            return FixState(fix, "not-needed", f"the installed SGLang {lacks}")
        if off is not None:
            return off
        why = "the installed SGLang has this bug"
        if fix.purpose == "performance":
            why = "G4DEBUG_FIXES=all" + (f"; runs {fix.eligible}" if fix.eligible else "")
    try:
        fix.apply(hooks)
        _check_sites(fix, hooks)
    except HookError as e:
        hooks.drop(fix.id)
        if forced:
            raise SettingsError(f"{switch}=1: {e}") from e
        return FixState(fix, "target-missing", str(e))
    return FixState(fix, "applied", why)


def _unwanted(fix: Fix, mode: str) -> FixState | None:
    """The state of a fix that this mode does not put in force by itself; None if it does."""
    own = fix_switch(fix.id)
    if fix.purpose == "experiment":
        return FixState(fix, "off", f"off by default; {own}=1 turns it on")
    if fix.purpose == "performance" and mode != "all":
        what = "a performance path" if fix.eligible else "it changes a default of SGLang"
        return FixState(fix, "off", f"{what}; G4DEBUG_FIXES=all or {own}=1 turns it on", "all")
    if mode == "none":
        return FixState(fix, "off", f"G4DEBUG_FIXES=none; {own}=1 turns it on", "needed")
    return None


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
