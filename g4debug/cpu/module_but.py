"""A module of which a few names are otherwise, for a stand-in that is put in a module's place."""

from __future__ import annotations

import types
from typing import Any


class ModuleBut(types.ModuleType):
    """``module``, except for what a subclass has of its own."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
