"""The rooms of the package stand on floors: proven from the imports, against docs/house.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.once("the code is ours alone")

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "g4debug"
# Below every floor: the version, and the door of `python -m g4debug`, which only opens cli.
OUTSIDE = ("", "__main__")


class Import(NamedTuple):
    """``name`` is '' where a module as a whole is imported."""

    importer: str
    module: str
    name: str
    line: int


def floors() -> list[tuple[str, ...]]:
    """The list in docs/house.md, lowest floor first."""
    text = (ROOT / "docs" / "house.md").read_text()
    block = text.partition("<!-- floors -->")[2].partition("<!-- /floors -->")[0]
    lines = [x for x in block.splitlines() if x and not x.startswith("```")]
    assert lines
    return [tuple(re.split(r",\s*", line.strip())) for line in reversed(lines)]


@cache
def modules() -> dict[str, Path]:
    """Dotted name below the package -> file; fixes/ through its link."""
    found = {}
    for path in sorted((ROOT / PACKAGE).glob("**/*.py")) + sorted((ROOT / "fixes").rglob("*.py")):
        inside = path.is_relative_to(ROOT / PACKAGE)
        relative = path.relative_to(ROOT / PACKAGE if inside else ROOT).with_suffix("")
        if relative.parts[:2] == ("cpu", "site") or (inside and relative.parts[0] == "fixes"):
            continue  # stand-ins for other packages; the link to fixes/
        parts = [p for p in relative.parts if p != "__init__"]
        found[".".join(parts)] = path
    return found


def imports(name: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of the package in a module: in functions and for type checkers, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield Import(name, alias.name.partition(".")[2], "", node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: a relative import"
            if (node.module or "").split(".")[0] != PACKAGE:
                continue
            inside = (node.module or "").partition(".")[2]
            for alias in node.names:
                deeper = f"{inside}.{alias.name}".lstrip(".")
                if deeper in modules():
                    yield Import(name, deeper, "", node.lineno)
                else:
                    yield Import(name, inside, alias.name, node.lineno)


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(
        found
        for name, path in modules().items()
        for found in imports(name, ast.parse(path.read_text()))
    )


def room(module: str) -> str:
    """The room that a module is in: the longest one that its name begins with."""
    rooms = [r for floor in floors() for r in floor]
    mine = [r for r in rooms if module == r or module.startswith(f"{r}.")]
    assert mine, f"{module} is in no room of docs/house.md"
    return max(mine, key=len)


def floor_of() -> dict[str, int]:
    return {name: level for level, floor in enumerate(floors()) for name in floor}


def climbing(found: tuple[Import, ...]) -> list[str]:
    """Imports of a room on the same floor or on a higher one."""
    level, wrong = floor_of(), []
    for item in found:
        if item.importer in OUTSIDE or item.module in OUTSIDE:
            continue
        here, there = room(item.importer), room(item.module)
        if here != there and level[there] >= level[here]:
            wrong.append(f"{item.importer}:{item.line} ({here}) imports {item.module} ({there})")
    return wrong


def circle(found: tuple[Import, ...]) -> list[str]:
    """Modules that import each other in a circle, '' if none do."""
    edges: dict[str, set[str]] = {}
    for item in found:
        if item.importer != item.module and item.module in modules():
            edges.setdefault(item.importer, set()).add(item.module)
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for next_module in sorted(edges.get(module, ())):
            around = walk(next_module, [*path, module])
            if around:
                return around
        done.add(module)
        return []

    for module in sorted(edges):
        around = walk(module, [])
        if around:
            return around
    return []


def private(found: tuple[Import, ...]) -> list[str]:
    """Imports of another room's underscore name."""
    return [
        f"{item.importer}:{item.line} imports {item.module} {item.name}".rstrip()
        for item in found
        if item.importer not in OUTSIDE
        and item.module not in OUTSIDE
        and room(item.importer) != room(item.module)
        and any(part.startswith("_") for part in (*item.module.split("."), item.name))
    ]


def test_every_module_is_in_a_room_and_every_room_is_there() -> None:
    rooms = {room(name) for name in modules() if name not in OUTSIDE}
    listed = [r for floor in floors() for r in floor]
    assert len(listed) == len(set(listed))
    assert rooms == set(listed)


def test_no_import_climbs() -> None:
    assert climbing(all_imports()) == []


def test_there_is_no_circle() -> None:
    assert circle(all_imports()) == []


def test_no_room_imports_another_ones_underscore_name() -> None:
    assert private(all_imports()) == []


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("from g4debug.cli import show", climbing),
        ("import g4debug.plugin", climbing),
        ("def f():\n    from g4debug.tracers.base import Context", climbing),
        ("from g4debug.faults.base import Fault", climbing),
        ("if TYPE_CHECKING:\n    from g4debug.ledger.hooks import LedgerHooks", circle),
        ("from g4debug.reporters import _facts", private),
        ("from g4debug.hooking.hooks import _runs", private),
    ],
)
def test_the_rules_see_what_they_forbid(line: str, rule) -> None:
    """The same line in the ledger's room, which must not have it."""
    added = tuple(imports("ledger.ledger", ast.parse(line)))
    assert added
    assert rule((*all_imports(), *added))
