"""Finds who else is at a hook site: the functions on the way to our hook, and from it to SGLang.

The function at a site may be SGLang's own function, a wrapper of SGLang's hook registry, or a
function that somebody put in its place (a monkeypatch), and each may lead to the next one. How a
function leads to another cannot be asked, so this looks where people keep the function that they
replaced: in ``__wrapped__``, in the closure, in a default argument, in a global of their module, in
a ``functools.partial`` or in an attribute of a callable object. Nothing is called or imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

REGISTRY = "sglang.srt.plugins.hook_registry"
# Modules with functions that are nobody's monkeypatch: SGLang, the modules of its decorators, and
# ours.
_HOST = ("sglang", "torch", "functools", "contextlib", "g4debug")
MOST = 400  # functions that are looked at, at most
DEEP = 40  # functions on one way, at most


def module_of(function: Any) -> str:
    """The module of its code. (``functools.wraps`` copies ``__module__`` of another function.)"""
    function = getattr(function, "__func__", function)
    space = getattr(function, "__globals__", None)
    if space is None:
        return str(getattr(type(function), "__module__", ""))
    return str(space.get("__name__", ""))


def is_host(function: Any) -> bool:
    """True if the function belongs to SGLang, to a library that SGLang decorates with, or to us."""
    return module_of(function).partition(".")[0] in _HOST


def is_registry(function: Any) -> bool:
    """True if SGLang's hook registry made this wrapper."""
    return module_of(function) == REGISTRY


def registered(function: Any) -> Any:
    """The hook that a wrapper of SGLang's hook registry calls. None for any other function."""
    return _closure(function).get("hook") if is_registry(function) else None


def original(function: Any) -> Any:
    """The function that a wrapper of SGLang's hook registry wraps. None for any other function."""
    return getattr(function, "__wrapped__", None) if is_registry(function) else None


def way(function: Any, arrived: Callable[[Any], bool]) -> list[Any] | None:
    """The functions from ``function`` to the first one that has ``arrived``, both included.

    None if there is no such way.
    """
    seen: set[int] = set()
    start = getattr(function, "__func__", function)
    stack: list[list[Any]] = [[start]]
    while stack and len(seen) < MOST:
        path = stack.pop()
        last = path[-1]
        if id(last) in seen:
            continue
        seen.add(id(last))
        if arrived(last):
            return path
        if len(path) < DEEP:
            stack += [[*path, n] for n in reversed(list(_next(last))) if id(n) not in seen]
    return None


def describe(function: Any) -> str:
    """How a person finds the function: name, file and line. ``meddle (meddler.py:48)``.

    If SGLang decorates the function (run_batch, for a profiler), the function inside is described.
    """
    function = getattr(function, "__func__", function)
    while is_host(function) and not is_registry(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if isinstance(function, functools.partial):
        return f"a partial of {describe(function.func)}"
    code = getattr(function, "__code__", None)
    if code is None:
        kind = type(function)
        return f"an object of {kind.__module__}.{kind.__qualname__}"
    name = code.co_qualname.replace("<locals>.", "")
    return f"{name} ({PurePath(code.co_filename).name}:{code.co_firstlineno})"


def _closure(function: Any) -> dict[str, Any]:
    """The variables that a function has from where it was defined."""
    code = getattr(function, "__code__", None)
    found = {}
    for name, cell in zip(
        getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False
    ):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an empty cell: its variable was deleted
            continue
    return found


def _next(function: Any) -> Iterator[Any]:
    """The functions that ``function`` may lead to, the likeliest first."""
    for value in _held(function):
        value = getattr(value, "__func__", value)
        leads = callable(value) or isinstance(value, functools.partialmethod)
        if leads and not isinstance(value, (type, ModuleType, BuiltinFunctionType)):
            yield value


def _held(function: Any) -> Iterator[Any]:
    if isinstance(function, (functools.partial, functools.partialmethod)):
        yield function.func
        yield from function.args
        yield from function.keywords.values()
        return
    if not isinstance(function, FunctionType):
        yield from getattr(function, "__dict__", {}).values()
        return
    closure = _closure(function)
    if is_registry(function):
        yield original(function)
        yield closure.get("hook")
        return
    yield getattr(function, "__wrapped__", None)
    yield from closure.values()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    # SGLang's own function names others of SGLang that are hooked, too. It does not lead to ours.
    if not is_host(function):
        for name in function.__code__.co_names:
            yield function.__globals__.get(name)
