"""Runs a function when this process imports a module, if it ever does.

Some modules of SGLang are imported by few of its processes and take long to import. So changes to
such a module wait until a process needs it.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Execute = Callable[[ModuleType], None]


def when_imported(module: str, then: Callable[[], None]) -> None:
    """Call ``then`` now if ``module`` is imported already, and else right behind its own code.

    What ``then`` raises, the import raises.
    """

    def behind(execute: Execute, imported: ModuleType) -> None:
        execute(imported)
        then()

    if module in sys.modules:
        then()
    else:
        in_place_of_its_code(module, behind)


def in_place_of_its_code(module: str, run: Callable[[Execute, ModuleType], None]) -> None:
    """Call ``run`` with what executes ``module``, which is not imported yet, and the module."""
    sys.meta_path.insert(0, _Finder(module, run))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the finders behind this one do, and has ``run`` execute it."""

    def __init__(self, module: str, run: Callable[[Execute, ModuleType], None]) -> None:
        self.module = module
        self.run = run

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
                self.run(execute, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
