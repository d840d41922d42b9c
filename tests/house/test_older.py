"""What only older SGLang needs lies apart, and nobody else asks which release this is."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from test_floors import ROOT, all_imports, modules

from g4debug import discovery, speculation
from g4debug.hooking import older, targets

FOLDER = re.compile(r"(?:^|\.)(before_\d+(?:_\d+)+)(?=\.|$)")
# Whoever declares something for some releases has one reader of these declarations.
READERS = {
    "hooking.targets": "the places of a site; what a release can do",
    "hooking.hooks": "the sites that a hook is for",
    "hooking.older": "the names of the folders",
    "fixes.base": "needs, elsewhere",
    "cli.triage": "the release that a log names, which need not be this one",
    "faults.base": "needs",
    "cpu.attach": "the releases of a stand-in",
}
NOT_YET: tuple[str, ...] = ()  # rooms in which that is not so yet


def folder(module: str) -> str:
    """The folder for older releases that a module is in, '' if it is in none."""
    found = FOLDER.search(module)
    return found[1] if found else ""


def releases(module: str) -> tuple[int, ...]:
    """Before which release the folder of a module is, () if it is in none."""
    return tuple(int(part) for part in folder(module).split("_")[1:])


def packages() -> list[str]:
    """Every package that has such folders."""
    found = {FOLDER.split(name)[0].rstrip(".") for name in modules() if folder(name)}
    return sorted(f"g4debug.{name}" for name in found)


def test_there_are_such_folders_and_each_is_found() -> None:
    named = {name[: found.end()] for name in modules() if (found := FOLDER.search(name))}
    assert "tracers.spec_lifecycle.before_0_5_14" in named
    listed = {name for package in packages() for name in discovery.older_folders(package)}
    assert listed == {f"g4debug.{name}" for name in named}


def test_nothing_outside_of_such_a_folder_imports_it() -> None:
    """A folder for the same releases, or for older ones, may: it never exists without this one."""
    wrong = [
        f"{i.importer}:{i.line} imports {i.module}"
        for i in all_imports()
        if folder(i.module) and not () < releases(i.importer) <= releases(i.module)
    ]
    assert wrong == []


def test_nobody_names_such_a_folder_in_a_string() -> None:
    for name, path in modules().items():
        if not folder(name):
            tree = ast.parse(path.read_text())
            texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant)]
            values = [n.value for n in texts if isinstance(n.value, str) and "\n" not in n.value]
            assert not [v for v in values if re.search(r"before_\d", v)], name


def test_a_fix_is_in_the_folder_for_its_releases() -> None:
    later = [Version(release) for release in ("0.5.14", "0.5.15.post1", "0.5.23", "0.6")]
    for name in discovery.names("fix"):
        needs = [SpecifierSet(n) for n in discovery.load("fix", name).needs.split(" or ")]
        apart = not any(version in n for version in later for n in needs)
        assert bool(folder(discovery.module_name("fix", name))) == apart, name


def questions(name: str, tree: ast.Module) -> list[str]:
    """Where a module asks which release of SGLang this is.

    To look a place up by ``targets.path`` is no question, but to ask whether there is one is.
    """
    there = re.compile(r"(not )?targets\.path\([^()]*\)$")  # whether there is such a place
    found = []
    for node in ast.walk(tree):
        asks: list[str] = []
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            asks = [s for s in sides if there.match(s) if "None" in sides]
            asks += [s for s in sides if "sglang_version(" in s if "None" not in sides]
        elif isinstance(node, (ast.BoolOp, ast.UnaryOp, ast.If, ast.IfExp, ast.comprehension)):
            of = next(x for x in ("values", "ifs", "test", "operand") if hasattr(node, x))
            parts = getattr(node, of)
            texts = map(ast.unparse, parts if isinstance(parts, list) else [parts])
            asks = [text for text in texts if there.match(text)]
        elif isinstance(node, ast.Attribute):
            asks = [t for t in [ast.unparse(node)] if t in ("targets.matches", "targets.absent")]
        elif isinstance(node, ast.ImportFrom) and node.module == "g4debug.hooking.targets":
            asks = [a.name for a in node.names if a.name in ("matches", "path", "absent")]
        found += [f"{name}:{getattr(node, 'lineno', '')}: {ask}" for ask in asks]
    return found


def test_nobody_else_asks_which_release_this_is() -> None:
    asked = [
        question
        for name, path in modules().items()
        if name not in READERS and not folder(name)
        if not any(name == room or name.startswith(f"{room}.") for room in NOT_YET)
        for question in questions(name, ast.parse(path.read_text()))
    ]
    assert asked == []


@pytest.mark.parametrize(
    "line",
    [
        'from g4debug.hooking import targets\nif targets.matches("<0.5.14"): pass',
        'x = targets.path("pool.release") is None',
        'if targets.path("pool.release"): pass',
        'x = targets.path("pool.release") or "here"',
        "x = [site for site in sites if targets.path(site)]",
        'x = targets.absent("pool.release")',
        "from g4debug.hooking.targets import matches",
        'x = targets.sglang_version() < Version("0.5.14")',
    ],
)
def test_the_rule_sees_what_it_forbids(line: str) -> None:
    assert questions("here", ast.parse(line))


def test_an_algorithm_is_named_by_its_adapter_alone() -> None:
    """And by a fix that is about it, by the table of what was run, and by what logs say."""
    names = {adapter.name for adapter in speculation.adapters()}
    assert names
    for name, path in modules().items():
        known = ("speculation.", "fixes.", "combinations.run", "triage.")
        if name.startswith(known) or folder(name):
            continue
        tree = ast.parse(path.read_text())
        said = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        asked = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert not said & names, name
        assert not asked & {f"is_{n.lower()}" for n in names}, name


def test_what_stands_in_is_what_the_folder_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "g4debug.faults.accept_length"
    for release, stands_in in (("0.5.13.post1", True), ("0.5.14", False), (None, False)):
        found = None if release is None else Version(release)
        monkeypatch.setattr(targets, "sglang_version", lambda found=found: found)
        assert (older.older_module(module) is not None) == stands_in
        assert older.older_module("g4debug.faults.page_oob") is None
    name = older.older_module(module, here=False).__name__
    assert name == "g4debug.faults.before_0_5_14.accept_length"


def test_spec_lifecycle_was_run_with_a_worker_where_it_was_run() -> None:
    """On a release with a folder of its own, the code in the folder says so."""
    everywhere = {r: places["spec-lifecycle"] for r, places in targets.RUN.items()}
    run = [(r, places) for a in speculation.adapters() for r, places in a.run.items()]
    assert run
    assert all(set(places) <= set(everywhere[r]) for r, places in run)


IMPORTS = """
import importlib, pkgutil
import g4debug
for module in pkgutil.walk_packages(g4debug.__path__, "g4debug."):
    if not module.name.startswith(("g4debug.cpu.site", "g4debug.__main__", "g4debug.cpu.__main__")):
        importlib.import_module(module.name)
print(g4debug.__file__)
"""


@pytest.mark.once("no release needs the folders of another one")
def test_a_tree_without_these_folders_can_be_imported(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "before_*")
    for name in ("g4debug", "fixes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore, symlinks=True)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(tmp_path))
