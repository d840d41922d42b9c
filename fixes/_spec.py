"""What a fix or performance path declares, and how its state is decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from g4debug import discovery, targets
from g4debug.hooks import HookError
from g4debug.settings import SettingsError, fix_switch

if TYPE_CHECKING:
    from g4debug.hooks import Hooks

State = Literal["applied", "not-needed", "off", "target-missing"]


@dataclass(frozen=True)
class Fix:
    """One fix, declared as ``FIX`` in its file.

    seed: the pull request that it implements. upstream: the thread that fixed it there.
    needs: SGLang versions that it was written for. still_broken: a probe of the installed
    code (never of its version). apply: puts the fix's wrappers on the hooks.
    """

    id: str
    title: str
    seed: str
    upstream: str
    needs: str
    still_broken: Callable[[], bool]
    apply: Callable[[Hooks], None]


@dataclass(frozen=True)
class FixState:
    fix: Fix
    state: State
    why: str

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"


def apply_all(
    hooks: Hooks, switches: Mapping[str, bool], recreated: Mapping[str, str]
) -> tuple[FixState, ...]:
    """Decide and apply every fix of the folder.

    ``switches``: fixes that the environment forces on or off. ``recreated``: fix id ->
    fault that puts the fixed bug back, which makes the fix needed again. Raises
    SettingsError for a fix that is forced on where it was not written for.
    """
    return tuple(
        _apply(discovery.load("g4debug.fixes", name, "FIX"), hooks, switches, recreated)
        for name in discovery.names("g4debug.fixes")
    )


def _apply(
    fix: Fix, hooks: Hooks, switches: Mapping[str, bool], recreated: Mapping[str, str]
) -> FixState:
    switch = fix_switch(fix.id)
    if switches.get(fix.id) is False:
        return FixState(fix, "off", f"{switch}=0")
    if not targets.matches(fix.needs):
        found = targets.sglang_version()
        if switches.get(fix.id):
            raise SettingsError(
                f"{switch}=1: fix {fix.id} was written for SGLang {fix.needs}, found {found}; "
                f"unset {switch}"
            )
        return FixState(fix, "not-needed", f"written for SGLang {fix.needs}, found {found}")
    if fix.id in recreated:
        why = f"fault {recreated[fix.id]} puts the bug back"
    elif switches.get(fix.id):
        why = f"{switch}=1"
    else:
        try:
            broken = fix.still_broken()
        except (ImportError, AttributeError, OSError, TypeError) as e:
            return FixState(fix, "target-missing", f"{type(e).__name__}: {e}")
        if not broken:
            return FixState(fix, "not-needed", "the installed SGLang does not have this bug")
        why = "the installed SGLang has this bug"
    try:
        fix.apply(hooks)
    except HookError as e:
        hooks.drop(fix.id)
        if switches.get(fix.id):
            raise SettingsError(f"{switch}=1: {e}") from e
        return FixState(fix, "target-missing", str(e))
    return FixState(fix, "applied", why)
