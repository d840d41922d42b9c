"""Runs a function as soon as this process has imported a module, if it ever does.

Some modules of SGLang are imported by few of its processes and take long to import. So changes to
such a module wait until a process needs it.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(module: str, then: Callable[[], None]) -> None:
    """Call ``then`` now if ``module`` is imported already, and else right behind its own code.

    What ``then`` raises, the import raises.
    """
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(module, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the finders behind this one do, and adds to what executes it."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module = module
        self.then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
