"""A shorter search of SGLang for other names of the functions that it hooks.

SGLang looks for them in every module of the process, for one hook after the other: some two seconds
of a core for each process that arms g4debug, and most of the time of a test that arms.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import g4debug

INSTALLED = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
    str(Path(g4debug.__file__).parent),
)


class Search:
    """Knows which modules have which function or class of SGLang's, or of ours.

    A module that has more or fewer names than when it was looked at is looked at again, and so is
    one that was imported since. In modules of tests anything may be.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}  # of a known module: how many names it has
        self._where: dict[int, set[str]] = defaultdict(set)
        self._alive: list[object] = []  # so that no other object gets a number of these
        self._open: list[str] = []
        self._count = -1
        self._look()

    def modules(self, original: object) -> dict[str, types.ModuleType]:
        """Those that may have it. What others than SGLang define may be in each of them."""
        if not of_sglang(original):
            return sys.modules
        if self._count != len(sys.modules):
            self._look()
        names = (*self._where.get(id(original), ()), *self._open)
        return {name: sys.modules[name] for name in names if name in sys.modules}

    def _look(self) -> None:
        self._count = len(sys.modules)
        self._open = []
        for name, module in list(sys.modules.items()):
            if not isinstance(module, types.ModuleType):
                continue
            space = vars(module)
            if self._names.get(name) == len(space):
                continue
            if not str(space.get("__file__") or INSTALLED[0]).startswith(INSTALLED):
                self._open.append(name)
                continue
            self._names[name] = len(space)
            for value in filter(of_sglang, list(space.values())):
                self._where[id(value)].add(name)
                self._alive.append(value)


def shorten() -> Search:
    """SGLang's registry of hooks searches like that from now on."""
    from sglang.srt.plugins import hook_registry

    search, whole = Search(), hook_registry._propagate_patch

    def propagate(original: object, wrapped: object, source: object) -> Any:
        hook_registry.sys = types.SimpleNamespace(modules=search.modules(original))
        try:
            return whole(original, wrapped, source)
        finally:
            hook_registry.sys = sys

    hook_registry._propagate_patch = propagate
    return search


def of_sglang(value: object) -> bool:
    """Whether it is a function or class of SGLang's, or of ours, which the CPU engine puts there.

    No other value is touched: some are lazy.
    """
    if type(value) is not types.FunctionType and not issubclass(type(value), type):
        return False
    return str(value.__module__).partition(".")[0] in ("sglang", "g4debug")
