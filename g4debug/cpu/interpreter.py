"""Triton's interpreter does less that leads to nothing.

Before each launch, and before each call of a jitted function within one, it goes through all that
``triton.language`` and its classes have, and replaces Triton's builtins by its own. Going through
it takes up to half of a kernel's time, and finds the same each time. ``quicken`` lets it go through
the builtins alone.

It also computes whether a sum or a product of integers overflows, in 64 bits and with two
comparisons, and then asserts nothing, because its ``debug`` is off. A third of a kernel's time goes
there; ``quicken`` leaves it out. And for each load, cast and constant it makes a table of all types
to look one of them up; ``quicken`` remembers what was found.

What a kernel computes is as before: tests/cpu/test_interpreter.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from types import ModuleType
from typing import Any, Final

MODULE: Final = "triton.runtime.interpreter"


class Inspect(ModuleType):
    """The module ``inspect`` as Triton's interpreter sees it.

    ``getmembers`` returns only members that were a builtin of Triton's when their owner was gone
    through; nothing else is asked for. Where an owner has got or lost an attribute since then, it
    is gone through again.
    """

    def __init__(self) -> None:
        super().__init__("inspect")
        self.__dict__.update({k: v for k, v in vars(inspect).items() if k != "getmembers"})
        self._lengths: dict[object, set[int]] = {}
        self._names: dict[object, list[str]] = {}

    def getmembers(self, owner: Any) -> list[tuple[str, Any]]:
        """owner: a module or class of ``triton.language``. Sorted by name."""
        lengths = self._lengths.setdefault(owner, set())
        if len(vars(owner)) not in lengths:
            is_builtin = importlib.import_module("triton.language").core.is_builtin
            found = {name for name, member in inspect.getmembers(owner) if is_builtin(member)}
            self._names[owner] = sorted(found.union(self._names.get(owner, ())))
            lengths.add(len(vars(owner)))
        # None, of a member that is gone, is no builtin.
        return [(name, getattr(owner, name, None)) for name in self._names[owner]]


class NumpyTypes:
    """``_get_np_dtype`` of Triton's interpreter, which it calls once for each type."""

    def __init__(self, triton: Any) -> None:
        self._interpreter, self._find = triton, triton._get_np_dtype
        self._found: dict[str, Any] = {}

    def __call__(self, tt_dtype: Any) -> Any:
        """tt_dtype: a type of ``triton.language``, of a value, a pointer, or a block of them."""
        block = isinstance(tt_dtype, self._interpreter.tl.block_type)
        name = (tt_dtype.element_ty if block else tt_dtype).name
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._find(tt_dtype)
        return found


def quicken() -> None:
    """In this process, from now on. A second call does nothing."""
    interpreter = importlib.import_module(MODULE)
    if not isinstance(interpreter.inspect, Inspect):
        interpreter.inspect = Inspect()  # type: ignore[attr-defined]
        if not isinstance(interpreter._get_np_dtype, NumpyTypes):
            interpreter._get_np_dtype = NumpyTypes(interpreter)  # type: ignore[attr-defined]
        builder = interpreter.interpreter_builder
        if not builder.options.debug:
            builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
