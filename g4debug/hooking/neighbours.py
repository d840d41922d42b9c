"""Lists other people's hooks at our sites: who wraps us, and whom we wrap.

A wrapper *outside* of ours can change what we have checked, or never call us. One *inside* is seen
by our tracers as if it were SGLang. Both may be quite right. But whoever reads a finding, or misses
one, has to know that they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from g4debug.hooking import chain
from g4debug.hooking.hooks import Hooks
from g4debug.hooking.plugins import Plugin

Side = Literal["outside", "inside", "instead", "never"]
MEANS: dict[str, str] = {
    "outside": "wraps our hook, so its changes are not checked",
    "inside": "our hook wraps it",
    "instead": "is there in place of our hook",
    "never": "never runs: it was registered when SGLang had patched the function already",
}


@dataclass(frozen=True)
class Neighbour:
    """Somebody else's hook at a site of ours."""

    site: str
    side: Side
    who: str  # "plugin meddler", or "module meddler" if no plugin is known for it
    function: str  # "meddle (meddler.py:48)"

    def __str__(self) -> str:
        return f"{self.who} at {self.site}: {self.function} {MEANS[self.side]}"


def neighbours(
    hooks: Hooks, plugins: Iterable[Plugin] = (), sites: Iterable[str] | None = None
) -> tuple[Neighbour, ...]:
    """The other hooks at each of our sites now, from outside to inside.

    plugins: those that are installed, by which the owner of a monkeypatch is recognised. sites:
    only these, None for all.
    """
    packages = {p.package: p.name for p in plugins}
    listed = _registry()
    found: list[Neighbour] = []
    installed = hooks.installed
    for site in installed if sites is None else sites:
        dotted, ours = installed[site]
        entries = listed(dotted)
        sources = {id(hook): source for hook, source in entries}

        def name(function: Any, sources: dict[int, str] = sources) -> tuple[str, str]:
            hook = chain.registered(function) or function
            module = chain.module_of(hook)
            plugin = sources.get(id(hook)) or packages.get(module.partition(".")[0], "")
            return (f"plugin {plugin}" if plugin else f"module {module}"), chain.describe(hook)

        there: set[int] = set()
        for side, function in _around(hooks, site, ours):
            there.add(id(chain.registered(function) or function))
            found.append(Neighbour(site, side, *name(function)))
        late = [hook for hook, _ in entries if id(hook) not in there and not _ours(hook, ours)]
        found += [Neighbour(site, "never", *name(hook)) for hook in late]
    return tuple(found)


def _around(hooks: Hooks, site: str, ours: Any) -> list[tuple[Side, Any]]:
    """The foreign functions at a site, each with its side, from outside to inside."""
    try:
        top = hooks.at(site)
    except LookupError:
        return []
    way = chain.way(top, lambda f: chain.registered(f) is ours)
    if way is None:
        return [("instead", f) for f in _foreign(_down(top), ours)]
    outside = _foreign(way[:-1], ours)
    inside = _foreign(_down(chain.original(way[-1])), ours)
    return [("outside", f) for f in outside] + [("inside", f) for f in inside]


def _down(function: Any) -> list[Any]:
    """The functions from this one to SGLang's own; only this one, if it leads nowhere."""

    def sglangs_own(f: Any) -> bool:
        return chain.module_of(f).startswith("sglang.") and not chain.is_registry(f)

    return chain.way(function, sglangs_own) or [function]


def _foreign(functions: list[Any], ours: Any) -> list[Any]:
    """The functions that are neither ours nor SGLang's, nor a library's that it decorates with."""
    return [f for f in functions if not _ours(chain.registered(f) or f, ours)]


def _ours(function: Any, ours: Any) -> bool:
    return function is ours or chain.is_host(function)


def _registry() -> Callable[[str], list[tuple[Any, str]]]:
    """Asks SGLang's registry for the hooks at a dotted path: each hook and its plugin's name."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    def listed(dotted: str) -> list[tuple[Any, str]]:
        entries = HookRegistry._hooks.get(dotted, ())
        return [(hook, source.plugin_name if source else "") for _, hook, source in entries]

    return listed
