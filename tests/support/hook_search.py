"""A shorter search of SGLang for other names of what it hooks.

SGLang looks for them in every module of the process, for one hook after the other: some two seconds
of a core for each process that arms g4debug, and most of the time of a test that arms. Four fifths
of what it reads are other packages, and three of their modules have anything of SGLang's.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from typing import Any

OURS = ("sglang", "g4debug")
INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))


class Fewer:
    """Of the module ``sys``, what SGLang's hook registry reads: ``modules``, less ``none``."""

    def __init__(self, none: frozenset[str]) -> None:
        self.none = none

    @property
    def modules(self) -> dict[str, types.ModuleType]:
        return {name: module for name, module in sys.modules.items() if name not in self.none}


def shorten() -> Fewer:
    """What SGLang defines is looked for where it can be; what others define, in every module.

    It can be in a module that is no installed one of another package, in one that has something of
    SGLang's now, and in one that is imported later.
    """
    from sglang.srt.plugins import hook_registry

    whole: Any = hook_registry._propagate_patch
    fewer = Fewer(frozenset(name for name in list(sys.modules) if not _may_have(name)))

    def propagate(original: object, wrapped: object, source: object) -> int:
        hook_registry.sys = fewer if _of_sglang(original) else sys
        try:
            return int(whole(original, wrapped, source))
        finally:
            hook_registry.sys = sys

    hook_registry._propagate_patch = propagate
    return fewer


def _may_have(name: str) -> bool:
    module = sys.modules[name]
    if name.startswith(OURS) or not isinstance(module, types.ModuleType):
        return True
    if not str(vars(module).get("__file__")).startswith(INSTALLED):
        return True
    return any(map(_of_sglang, list(vars(module).values())))


def _of_sglang(value: object) -> bool:
    """Whether a function or class is one of SGLang's. Others are not touched: some are lazy."""
    value = getattr(value, "__func__", value) if type(value) in _METHODS else value
    if type(value) is not types.FunctionType and not issubclass(type(value), type):
        return False
    return str(value.__module__).startswith("sglang")


_METHODS = (classmethod, staticmethod, types.MethodType)
