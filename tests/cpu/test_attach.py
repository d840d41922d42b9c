"""Which stand-in is in force on which release, and that the start stops where one has no place."""

from __future__ import annotations

import ast
import importlib
import sys

import pytest
from packaging.version import Version

from g4debug import cpu
from g4debug.cpu import attach, verify_sampling
from g4debug.hooking import targets


def kernels_that_sglang_imports() -> set[str]:
    """What modules of the installed SGLang import from sgl_kernel, on a CPU, as they are loaded."""
    found = set()
    for folder in ("srt", "kernels"):
        for path in (targets.sglang_root() / "sglang" / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "from sgl_kernel import" not in text or "_is_cpu" not in text:
                continue
            for node in ast.parse(text).body:
                found |= set(_under_is_cpu(node))
    return found


def _under_is_cpu(node):
    """Of `if _is_cpu: from sgl_kernel import ...` and of `elif _is_cpu:`, the names."""
    if not isinstance(node, ast.If):
        return
    if isinstance(node.test, ast.Name) and node.test.id == "_is_cpu":
        for line in node.body:
            if isinstance(line, ast.ImportFrom) and line.module == "sgl_kernel":
                yield from (alias.name for alias in line.names)
    for deeper in node.orelse:
        yield from _under_is_cpu(deeper)


def test_the_table_has_the_kernels_that_this_release_imports_and_no_other():
    ours = [s for s in attach.for_this_release() if s.module == attach.SGL_KERNEL]
    # Those by which 0.5.14 and 0.5.15 verify are imported where they are called, on every device.
    verify = [s for s in ours if s.replacement.__module__ == verify_sampling.__name__]
    assert {s.path for s in ours} - {s.path for s in verify} == kernels_that_sglang_imports()


@pytest.mark.parametrize(
    ("release", "has", "lacks"),
    [
        ("0.5.12.post1", "apply_vocab_mask", "get_platform"),
        ("0.5.15.post1", "assign_extend_cache_locs_func", "verify_tree_greedy_cpu"),
        ("0.5.23", "verify_tree_greedy_cpu", "verify_tree_greedy_func"),
    ],
)
def test_each_release_has_its_own(monkeypatch, release, has, lacks):
    monkeypatch.setattr(targets, "sglang_version", lambda: Version(release))
    names = {s.path.split(".")[-1] for s in attach.for_this_release()}
    assert has in names
    assert lacks not in names


def test_a_place_that_is_gone_stops_the_start():
    for module, path in (
        ("os.path", "no_such_kernel"),
        ("os.path", "NoClass.method"),
        ("json.no_such_module", "kernel"),
        ("no_such_package.module", "kernel"),
    ):
        gone = attach.StandIn(module, path, print, "test", ">=0.5.12")
        with pytest.raises(cpu.CpuEngineError, match=rf"has no {module}:{path}.*>=0\.5\.12"):
            attach._attach(gone)


def test_a_module_that_lacks_what_it_imports_is_not_called_absent(tmp_path, monkeypatch):
    (tmp_path / "half_here.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        attach._attach(attach.StandIn("half_here", "kernel", print, "test"))


@pytest.mark.parametrize("imported", ["before", "later"])
def test_a_stand_in_that_wraps_is_put_where_the_module_is_imported(tmp_path, monkeypatch, imported):
    (tmp_path / "few_import_it.py").write_text("def ask():\n    return ['asked']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "few_import_it", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(attach, "_installed", False)
    wrap = attach.StandIn(
        "few_import_it", "ask", lambda ask: lambda: ["awaited", *ask()], "test", wraps=True
    )
    monkeypatch.setattr(attach, "TABLE", (wrap,))
    if imported == "before":
        importlib.import_module("few_import_it")
    attach.install()
    assert ("few_import_it" in sys.modules) is (imported == "before")
    assert importlib.import_module("few_import_it").ask() == ["awaited", "asked"]
