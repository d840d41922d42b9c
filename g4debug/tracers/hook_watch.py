"""Looks at our hooks while the server runs, and reports hooks that are gone.

At start every hook is checked to be in place (:meth:`g4debug.hooking.hooks.Hooks.audit`). Later
somebody may put SGLang's own function back, load a module anew, or wrap ours. A tracer whose hook
is gone does not see what happens any more, and the page ledger, which misses an event, believes
wrong things from then on. So this looks again:

* when the server is idle, at most once in ``IDLE_SECONDS``;
* after every ``BUSY_STEPS`` steps;
* before a finding is reported, and when a dump is written.

A hook that is gone is logged in one line, and the status of its owner (a tracer, the ledger or a
fix) says so. It stops no server. If the ledger has lost a hook, it is given up. A finding may only
come from an event that we missed if a hook of its tracer, of the step recorder or of the ledger has
been gone at any time since the start. Then it is logged and not reported, unless its kind is
certain by itself.

A hook that was taken away and put back between two looks is not noticed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from g4debug.backends import adapters
from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Finding, OtherHook
from g4debug.findings.status import LEDGER, STEPS
from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Gone, Hooks, SiteState
from g4debug.hooking.neighbours import Neighbour, neighbours
from g4debug.hooking.plugins import Plugin
from g4debug.tracers.base import Context, Tracer

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger

IDLE_SECONDS = 10.0
BUSY_STEPS = 1024
AGAIN_SECONDS = 1.0
# The checked objects pass through these sites: a wrapper around our hook there can change them
# after our check. (Elsewhere a wrapper only sees the same values as we do.)
CARRIES = (
    *(site for adapter in adapters() for site in (*adapter.sites, *adapter.fused_writes)),
    "kv.set",
    "pool.",
    "swa.",
)
BEHIND = "changes behind its hooks are not checked"
logger = logging.getLogger("g4debug")


class HookWatch:
    """Looks at the hooks, and remembers which of them were gone and who else is at our sites.

    lost: site -> its owners, for each hook that was ever gone. fixes: the states of the fixes, in
    which a fix without its hook is entered. plugins: those that are installed for SGLang.
    """

    def __init__(
        self,
        hooks: Hooks,
        recorder: Recorder,
        ledger: Ledger | None,
        tracers: Iterable[Tracer],
    ) -> None:
        self.hooks, self.recorder, self.ledger = hooks, recorder, ledger
        self.fixes: MutableMapping[str, str] = {}
        self.plugins: tuple[Plugin, ...] = ()
        self.lost: dict[str, tuple[str, ...]] = {}
        self._needs_ledger = {t.id for t in tracers if t.ledger}
        self._gone: dict[str, Gone] = {}  # by site, as they were last seen
        self._neighbours: dict[str, tuple[Neighbour, ...]] = {}  # by site, as they were last seen
        self._outside: set[Neighbour] = set()
        self._looked_at = (time.monotonic(), 0)  # when, and in which step
        self._others: Callable[[], tuple[OtherHook, ...] | None] = tuple

    def install(self, context: Context) -> None:
        context.before("scheduler.on_idle", self.on_idle)
        context.after("scheduler.run_batch", self.after_step)
        self.trap = context.trap
        self.trap.doubt = context.isolate(self.doubt)
        self._others = context.isolate(self.others)

    def never(self, sites: Iterable[SiteState]) -> None:
        """Sites at which our hooks could not be put at start, and the server starts all the same.

        That is so only in log mode, on a release that these tracers were never run on.
        """
        for site in sites:
            self.lost[site.site] = site.owners
            where = f"SGLang's {site.path or site.site} is {site.state}"
            for owner in dict.fromkeys(site.owners):
                if owner == LEDGER and self.ledger is not None:
                    if not self.ledger.broken:
                        self.ledger.give_up(f"it does not see every event: {where}")
                else:
                    part = self.recorder.status.part(owner)
                    part.limit(f"it sees nothing of {site.site}", f"{where} ({site.detail})")

    def on_idle(self, *args: Any, **kwargs: Any) -> None:
        """Called again and again while there is nothing to do."""
        if self._age() >= IDLE_SECONDS:
            self.look()

    def after_step(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        if self.recorder.step - self._looked_at[1] >= BUSY_STEPS:
            self.look()
        return result

    def _age(self) -> float:
        """Seconds since the last look."""
        return time.monotonic() - self._looked_at[0]

    def look(self) -> None:
        """Look at every hook of ours, and tell the news."""
        self._looked_at = (time.monotonic(), self.recorder.step)
        gone, changed = self.hooks.look()
        self._tell(gone)
        dead: dict[str, dict[str, str]] = {}
        for site in gone:
            for owner in dict.fromkeys(site.owners):
                dead.setdefault(owner, {})[site.site] = site.why
        for name, part in list(self.recorder.status.parts.items()):
            part.audited(dead.get(name, {}))
            if dead.get(name) and set(dead[name]) == set(self.hooks.sites_of(name)):
                part.off("none of its hooks runs any more")
        if LEDGER in dead and self.ledger is not None and not self.ledger.broken:
            sites = ", ".join(dead[LEDGER])
            self.ledger.give_up(f"it does not see every event, because its hook at {sites} is gone")
        for owner in dead.keys() & self.fixes.keys():
            sites = ", ".join(dead[owner])
            self.fixes[owner] = f"removed: its hook at {sites} does not run any more"
        if changed or gone:
            self._outsiders((*changed, *(g.site for g in gone)))

    def look_for_dump(self) -> tuple[OtherHook, ...]:
        """The same, and who else is at our sites. A failure of ours must not cost the dump."""
        return self._others() or ()

    def others(self) -> tuple[OtherHook, ...]:
        """Look at every hook. Returns who else is at our sites now."""
        self.look()
        found = (n for site in self._neighbours.values() for n in site)
        return tuple(OtherHook(n.site, n.side, n.who, n.function) for n in found)

    def doubt(self, finding: Finding) -> str:
        """Why this finding must not be believed. '' if nothing speaks against it.

        In log and contain mode there may be thousands of findings, of which none stops the server:
        there a look that was made a moment ago is good enough.
        """
        if self.trap.settings.mode == "raise" or self._age() >= AGAIN_SECONDS:
            self.look()
        kind = KINDS.get(finding.check, {}).get(finding.kind)
        if kind is not None and kind.sure:
            return ""
        owners = {finding.check, STEPS}
        if finding.check in self._needs_ledger:
            owners.add(LEDGER)
        sites = [site for site, theirs in self.lost.items() if owners & set(theirs)]
        if sites:
            return f"hooks that it stands on were gone: {', '.join(sites)}"
        part = self.recorder.status.parts.get(finding.check)
        return "this tracer is off" if part is not None and part.is_off else ""

    def _tell(self, gone: tuple[Gone, ...]) -> None:
        """One line for all that is new."""
        now = {g.site: g for g in gone}
        new = [g for g in gone if g.site not in self._gone]
        back = [g for site, g in self._gone.items() if site not in now]
        self._gone = now
        if new:
            self.lost |= {g.site: g.owners for g in new}
            sites = "; ".join(f"{g.site}: {g.why}, so {_blind(g)} nothing there" for g in new)
            count = f"{len(now)} of {len(self.hooks.installed)}"
            logger.warning("g4debug: hooks do not run any more (%s): %s", count, sites)
        if back:
            logger.warning(
                "g4debug: hooks run again, but what happened meanwhile was missed: %s",
                ", ".join(g.site for g in back),
            )

    def _outsiders(self, changed: Sequence[str]) -> None:
        """Note who else is at these sites, and tell who wraps our hooks there."""
        for site in changed:
            self._neighbours[site] = neighbours(self.hooks, self.plugins, (site,))
        found = (n for site in changed for n in self._neighbours[site] if n.side == "outside")
        new = [n for n in dict.fromkeys(found) if n not in self._outside]
        self._outside.update(new)
        if new:
            logger.warning("g4debug: %s", "; ".join(map(str, new)))
        for n in new:
            if n.site.startswith(CARRIES):
                for owner in dict.fromkeys(self.hooks.owners(n.site)):
                    if owner in self.recorder.status.parts:
                        part = self.recorder.status.part(owner)
                        part.limit(BEHIND, f"{n.who} wraps it at {n.site}")


def _blind(gone: Gone) -> str:
    """``page-table sees``; ``page-table, pool-leak see``."""
    owners = list(dict.fromkeys(gone.owners))
    return f"{', '.join(owners)} {'sees' if len(owners) == 1 else 'see'}"
