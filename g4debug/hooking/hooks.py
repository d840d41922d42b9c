"""Puts wrappers around SGLang's functions, and checks that they are really there.

SGLang runs only the first hook that is registered for a function, and if the function is missing
it only logs that. So all fixes, faults and tracers at one site share a single AROUND hook, which
calls them in this order, innermost first::

    SGLang's own function -> fixes -> faults -> tracers -> flight recorder

After SGLang's ``apply_hooks``, :meth:`Hooks.audit` checks that each site is wrapped. While the
server runs, somebody may put another function in the place of one that we wrapped, so
:meth:`Hooks.look` checks it again, cheaply: it visits our own sites only and imports nothing.
"""

from __future__ import annotations

import functools
import itertools
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from g4debug.hooking import chain, targets

Around = Callable[..., Any]  # around(call_next, *args, **kwargs) -> result
Before = Callable[..., None]  # before(*args, **kwargs)
After = Callable[..., Any]  # after(result, *args, **kwargs) -> result


class Order(IntEnum):
    """The order of the wrappers at one site, innermost first."""

    FIX = 0
    FAULT = 1
    TRACER = 2
    LAST = 3  # the flight recorder, which sees what the tracers raise or let through


class Isolated:
    """A hook that can fail without harm to SGLang. After a failure it is not called any more.

    failed: told of the exception. It sets ``on`` to False.
    lets: exceptions that go on to SGLang, and that ``failed`` is not told of.
    keeps: a call gives its first argument if there is no result, as it must after a site.
    watches: a call gives its first argument in any case, and what the hook returns is nobody's.
    """

    __slots__ = ("failed", "hook", "keeps", "lets", "on", "watches")

    def __init__(
        self,
        hook: Callable[..., Any],
        failed: Callable[[Exception], None],
        keeps: bool = False,
        watches: bool = False,
        lets: tuple[type[Exception], ...] = (),
    ) -> None:
        self.hook, self.failed, self.lets, self.on = hook, failed, lets, True
        self.keeps, self.watches = keeps or watches, watches

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.on:
            try:
                result = self.hook(*args, **kwargs)
                return args[0] if self.watches else result
            except self.lets:
                raise
            except Exception as e:
                self.failed(e)
        return args[0] if self.keeps else None


# Who else puts wrappers around SGLang's functions in this process, beside the plugin's own.
also: list[Callable[[Hooks], None]] = []


class HookError(Exception):
    """A site cannot be hooked. The text names the site and who needs it."""


@dataclass(frozen=True)
class Entry:
    """One wrapper at one site.

    before, after: what the wrapper calls, if it is no more than a call before or after the site.
    """

    order: Order
    owner: str
    around: Around
    before: Before | None = None
    after: After | None = None

    @property
    def is_plain(self) -> bool:
        return self.before is not None or self.after is not None


@dataclass(frozen=True)
class SiteState:
    """One line of the audit: whether a site exists, and whether our hook is in place there."""

    site: str
    path: str | None
    state: str  # "wrapped"; "found" (not wrapped by us); "missing"; "absent" (not in this release)
    owners: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True)
class Gone:
    """A site of ours at which our hook does not run any more."""

    site: str
    owners: tuple[str, ...]
    why: str  # the function that is there instead, in words


class Hooks:
    """Collects wrappers by site, then registers one hook per site with SGLang."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Entry]] = defaultdict(list)
        self._installed: dict[str, Around] = {}
        self._paths: dict[str, str] = {}  # of the sites in _installed, as SGLang got them
        # At each site the function that was last seen to run our hook, and how many hooks SGLang's
        # registry listed for it then.
        self._seen: dict[str, tuple[Any, int]] = {}
        self._registered: Mapping[str, Sized] = {}  # SGLang's registry: dotted path -> hooks

    def around(
        self, site: str, order: Order, owner: str, wrapper: Around, optional: bool = False
    ) -> None:
        """Put ``wrapper(call_next, *args, **kwargs)`` around a site.

        optional: a release that has no such site is none the worse for it. Else HookError is raised
        there.
        """
        self._enter(site, Entry(order, owner, wrapper), optional)

    def _enter(self, site: str, entry: Entry, optional: bool) -> None:
        if not targets.absent(site):
            self._entries[site].append(entry)
        elif not optional:
            raise HookError(
                f"{entry.owner}: SGLang {targets.sglang_version()} has no {site}; run: g4debug "
                "doctor"
            )

    def drop(self, owner: str) -> None:
        """Forget all wrappers of ``owner``, because half a fix is worse than none."""
        for site in list(self._entries):
            self._entries[site] = [e for e in self._entries[site] if e.owner != owner]
            if not self._entries[site]:
                del self._entries[site]

    def sites_of(self, owner: str) -> tuple[str, ...]:
        """Sites that ``owner`` wraps, sorted."""
        return tuple(s for s in self.sites if any(e.owner == owner for e in self._entries[s]))

    def before(
        self, site: str, order: Order, owner: str, hook: Before, optional: bool = False
    ) -> None:
        """Call ``hook(*args, **kwargs)`` before a site. optional: as of :meth:`around`."""

        def around(call_next: Around, *args: Any, **kwargs: Any) -> Any:
            hook(*args, **kwargs)
            return call_next(*args, **kwargs)

        self._enter(site, Entry(order, owner, around, before=hook), optional)

    def after(
        self, site: str, order: Order, owner: str, hook: After, optional: bool = False
    ) -> None:
        """Call ``hook(result, *args, **kwargs)`` after a site. The result is what it returns.

        optional: as of :meth:`around`.
        """

        def around(call_next: Around, *args: Any, **kwargs: Any) -> Any:
            return hook(call_next(*args, **kwargs), *args, **kwargs)

        self._enter(site, Entry(order, owner, around, after=hook), optional)

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites with at least one wrapper, sorted."""
        return tuple(sorted(self._entries))

    def owners(self, site: str) -> tuple[str, ...]:
        """The owners of a site's wrappers, innermost first."""
        return tuple(e.owner for e in sorted(self._entries[site], key=lambda e: e.order))

    def install(self) -> None:
        """Register the hooks with SGLang, which applies them after all plugins have run."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        self._registered = HookRegistry._hooks
        for site in self.sites:
            self._installed[site] = self._compose(site)
            self._paths[site] = str(targets.path(site))
            HookRegistry.register(self._paths[site], self._installed[site], HookType.AROUND)

    def _compose(self, site: str) -> Around:
        """One AROUND hook that runs every wrapper of a site, tracers outermost."""
        entries = sorted(self._entries[site], key=lambda e: e.order)
        wrappers = [
            wrapper
            for plain, alike in itertools.groupby(entries, key=lambda e: e.is_plain)
            for wrapper in ((_together(list(alike)),) if plain else (e.around for e in alike))
        ]
        if len(wrappers) == 1:
            return wrappers[0]

        # SGLang passes the same original function each time, so the chain is built only once.
        built: tuple[Around | None, Around] = (None, _nothing)

        def fan_out(original: Around, *args: Any, **kwargs: Any) -> Any:
            nonlocal built
            if built[0] is not original:
                chain = original
                for wrapper in wrappers:
                    chain = functools.partial(wrapper, chain)
                built = (original, chain)
            return built[1](*args, **kwargs)

        return fan_out

    def audit(self) -> tuple[SiteState, ...]:
        """For every site of the table: does it exist, and does our hook really run there?"""
        return tuple(self._inspect(site) for site in sorted(targets.SITES))

    def missing(self) -> tuple[SiteState, ...]:
        """Sites that somebody needs, and that are not wrapped by us."""
        return tuple(s for s in self.audit() if s.owners and s.state != "wrapped")

    def look(self) -> tuple[tuple[Gone, ...], tuple[str, ...]]:
        """Sites at which our hook does not run now, and sites where something has changed.

        That is the function that is called there, or the hooks that are registered for it.

        For a running server: it imports nothing, and a function that was looked into before is not
        looked into again. So this costs a microsecond or two for each site, unless somebody has
        changed it. At the first look every site has changed.
        """
        gone, changed = [], []
        for site, hook in self._installed.items():
            try:
                function = self.at(site)
            except LookupError as e:
                gone.append(Gone(site, self.owners(site), str(e)))
                continue
            seen, listed = self._seen.get(site), len(self._registered.get(self._paths[site], ()))
            if seen is not None and seen[0] is function and seen[1] == listed:
                continue
            if _runs(function, hook):
                self._seen[site] = function, listed
                changed.append(site)
            else:
                self._seen.pop(site, None)
                why = f"{chain.describe(function)} is there instead"
                gone.append(Gone(site, self.owners(site), why))
        return tuple(gone), tuple(changed)

    def at(self, site: str) -> Any:
        """The function that is called now at a site where we installed a hook. Imports nothing.

        Raises LookupError if there is none.
        """
        dotted = self._paths[site]
        parts = dotted.split(".")
        for count in range(len(parts) - 1, 0, -1):
            found: Any = sys.modules.get(".".join(parts[:count]))
            if found is None:
                continue
            for name in parts[count:]:
                try:
                    found = getattr(found, name)
                except AttributeError as e:
                    raise LookupError(f"{dotted} is not there any more: {e}") from e
            return getattr(found, "__func__", found)
        raise LookupError(f"the module of {dotted} is not loaded any more")

    def own(self, site: str, owner: str) -> Around | None:
        """SGLang's own function at a site. None if it must not be called in place of the hooked
        one, because somebody else than ``owner`` has a hook there, or a wrapper around ours.
        """
        if set(self.owners(site)) != {owner}:
            return None
        try:
            function = self.at(site)
        except LookupError:
            return None
        if chain.registered(function) is not self._installed.get(site):
            return None
        found: Around | None = chain.original(function)
        return found

    @property
    def installed(self) -> dict[str, tuple[str, Around]]:
        """Site -> its dotted path and our hook, as SGLang got them."""
        return {site: (self._paths[site], hook) for site, hook in self._installed.items()}

    def _inspect(self, site: str) -> SiteState:
        dotted = targets.path(site)
        owners = self.owners(site) if site in self._entries else ()
        if dotted is None:
            return SiteState(site, None, "absent", owners, "not in this SGLang release")
        parent, attribute = dotted.rsplit(".", 1)
        try:
            function = getattr(pkgutil.resolve_name(parent), attribute)
        except Exception as e:
            # Importing a module of SGLang may fail in any way. The audit reports that and goes on.
            return SiteState(site, dotted, "missing", owners, f"{type(e).__name__}: {e}")
        hook = self._installed.get(site)
        wrapped = hook is not None and _runs(function, hook)
        return SiteState(site, dotted, "wrapped" if wrapped else "found", owners)


def _together(entries: list[Entry]) -> Around:
    """One wrapper for neighbours that only call something before or after a site.

    It does what they would do one around the other, but with one frame in place of two for each:
    a decode step passes some hundred hooks. So the isolation of a hook is done here, too.
    entries: innermost first.
    """
    before = tuple(_isolated(e.before) for e in reversed(entries) if e.before is not None)
    after = tuple(_isolated(e.after) for e in entries if e.after is not None)

    def around(call_next: Around, *args: Any, **kwargs: Any) -> Any:
        for enter in before:
            if enter.on:
                try:
                    enter.hook(*args, **kwargs)
                except enter.lets:
                    raise
                except Exception as e:
                    enter.failed(e)
        result = call_next(*args, **kwargs)
        for leave in after:
            if leave.on:
                try:
                    found = leave.hook(result, *args, **kwargs)
                    if not leave.watches:
                        result = found
                except leave.lets:
                    raise
                except Exception as e:
                    leave.failed(e)
        return result

    return around


def _isolated(hook: Before | After) -> Isolated:
    """A hook that is not isolated raises whatever it raises."""
    return hook if isinstance(hook, Isolated) else Isolated(hook, _nothing, lets=(Exception,))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A placeholder that is never called, for example for a chain that is not built yet."""


def _runs(function: Any, hook: Around) -> bool:
    """True if ``function`` leads to the wrapper of SGLang's that calls ``hook``.

    SGLang's own list of patched functions proves nothing: it also lists hooks that were registered
    after the function was patched, and those never run. So look for the hook in the functions
    themselves.
    """
    return chain.way(function, lambda f: chain.registered(f) is hook) is not None
