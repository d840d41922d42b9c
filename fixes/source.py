"""Reads SGLang's source without importing SGLang, for ``still_broken()`` of the fixes.

So ``still_broken()`` works for the installed SGLang and, inside
:func:`g4debug.hooking.targets.looking_at`, for a wheel that is only unpacked. Names are followed as
Python does it: a method to the base class that defines it, and a name to the module from which it
was imported. Changes at run time (``setattr``, a patch of another plugin) are not seen.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from g4debug.hooking import targets

_HOPS = 20  # imports and base classes to follow; more would be a circle


def source(dotted: str) -> str:
    """The source of a module, class, function, method or assignment, with its decorators.

    ``dotted`` is a full path such as ``sglang.srt.managers.scheduler.Scheduler.run_batch``. Raises
    ImportError if there is no such module, and AttributeError if the module has no such name. Both
    make the state ``target-missing`` in :func:`g4debug.fixes.base.apply_all`.
    """
    path, names = _module(dotted)
    if not names:
        return _text(path)
    path, node = _find(path, names, dotted, _HOPS)
    lines = _text(path).splitlines(keepends=True)
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "".join(lines[first - 1 : node.end_lineno])


def exists(dotted: str) -> bool:
    """True if SGLang's source has this module, class, function or method."""
    try:
        source(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def _module(dotted: str) -> tuple[Path, list[str]]:
    """The file of the longest beginning that is a module, and the names that are left."""
    here, names = targets.sglang_root(), dotted.split(".")
    for i, name in enumerate(names):
        if (here / name).is_dir():
            here = here / name
        elif (here / f"{name}.py").is_file():
            return here / f"{name}.py", names[i + 1 :]
        elif (here / "__init__.py").is_file():
            return here / "__init__.py", names[i:]
        else:
            break
    else:
        if (here / "__init__.py").is_file():
            return here / "__init__.py", []
    raise ImportError(f"SGLang {targets.sglang_version()} has no module of {dotted}")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def _parse(path: Path, changed: int) -> ast.Module:
    try:
        return ast.parse(_text(path), str(path))
    except SyntaxError as e:  # SGLang was written for a newer Python than this one
        raise ImportError(f"{path.name} cannot be read: {e}") from e


def _find(path: Path, names: list[str], dotted: str, hops: int) -> tuple[Path, ast.stmt]:
    """The file and the statement that define ``names[0].names[1]...`` for the module ``path``."""
    module = _parse(path, path.stat().st_mtime_ns)
    node = _defined(module.body, names[0]) if names and hops else None
    for line in module.body if node is None and names and hops else ():
        if isinstance(line, ast.ImportFrom) and line.names[0].name == "*":
            named = ast.ImportFrom(line.module, [ast.alias(names[0])], line.level)
            try:
                return _find(*_imported(path, named, names), dotted, hops - 1)
            except (ImportError, AttributeError):
                continue  # another line may import it
    if node is None:
        raise AttributeError(f"SGLang {targets.sglang_version()} has no {dotted}")
    if isinstance(node, (ast.ImportFrom, ast.Import)):
        return _find(*_imported(path, node, names), dotted, hops - 1)
    if len(names) == 1:
        return path, node
    if isinstance(node, ast.Assign):  # a class that is rebuilt: C = msgspec.defstruct("C", ...)
        classes = [n for n in module.body if isinstance(n, ast.ClassDef)]
        node = _defined(list[ast.stmt](classes), names[0]) or node
    if isinstance(node, ast.ClassDef):
        member = _defined(node.body, names[1])
        if member is not None and len(names) == 2:
            return path, member
        for base in node.bases:
            chain = ast.unparse(base).partition("[")[0].split(".")
            try:
                return _find(path, [*chain, *names[1:]], dotted, hops - 1)
            except (ImportError, AttributeError):
                continue  # try the next base; this one may be of another package
    raise AttributeError(f"SGLang {targets.sglang_version()} has no {dotted}")


def _defined(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The last statement that binds ``name``, also inside of an ``if``, ``try`` or ``with``."""
    found: ast.stmt | None = None
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                found = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if any((a.asname or a.name.partition(".")[0]) == name for a in node.names):
                found = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            bound = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in bound):
                found = node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            for handler in getattr(node, "handlers", []):
                inner += handler.body
            found = _defined(inner, name) or found
    return found


def _imported(
    path: Path, node: ast.Import | ast.ImportFrom, names: list[str]
) -> tuple[Path, list[str]]:
    """Where an import statement of the module ``path`` leads for ``names``."""
    alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == names[0])
    if isinstance(node, ast.Import):
        head = alias.name if alias.asname else names[0]
        return _module(".".join([head, *names[1:]]))
    origin = node.module or ""
    if node.level:
        package = path.parent
        for _ in range(node.level - 1):
            package = package.parent
        prefix = package.relative_to(targets.sglang_root()).parts
        origin = ".".join([*prefix, *filter(None, [origin])])
    return _module(".".join([origin, alias.name, *names[1:]]))
