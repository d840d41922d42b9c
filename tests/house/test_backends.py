"""An attention backend is declared in one file: all others, and the docs, derive from that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from g4debug.backends import adapters
from g4debug.hooking import targets

ROOT = Path(__file__).resolve().parents[2]
# The adapters, the sites of each release, the stand-ins for kernels of a backend, the table of
# what was run with which, and what logs of any server say.
KNOW_THEM = (
    "g4debug/backends/", "g4debug/hooking/targets.py", "g4debug/cpu/",
    "g4debug/combinations/run.py", "g4debug/triage/",
)  # fmt: skip
# Packages of these names in lists of packages: the compiler, and the library of kernels.
PACKAGES = {
    "g4debug/trapping/describe.py": {"triton"},
    "g4debug/tracers/flight_recorder/busy.py": {"triton", "flashinfer"},
    "g4debug/tracers/flight_recorder/device_asserts.py": {"flashinfer"},
}


def names() -> dict[str, str]:
    """What a backend is called in code -> its adapter's name: itself, its class and its module.

    Class and module are known where this SGLang has the adapter's site.
    """
    found = {}
    for adapter in adapters():
        path = targets.path(adapter.built)
        called = () if path is None else path.split(".")[-3:-1]
        found |= dict.fromkeys((adapter.name, *called), adapter.name)
    return found


def literals(tree: ast.Module) -> Iterator[str]:
    """The strings of a module's code, without its docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def named(text: str) -> set[str]:
    """The adapters' names that a module's code has. A longer word, as in a fix's id, is none."""
    called = names()
    pattern = re.compile(rf"(?<![\w-])({'|'.join(called)})(?![\w-])")
    return {called[word] for part in literals(ast.parse(text)) for word in pattern.findall(part)}


def files() -> list[tuple[str, str]]:
    """(path, text) of each module that must not know a backend, and of each fix."""
    paths = [*(ROOT / "g4debug").glob("**/*.py"), *(ROOT / "fixes").rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    return [
        (name, text)
        for name, text in sorted(found.items())
        if not name.startswith((*KNOW_THEM, "g4debug/fixes/"))
    ]


def test_only_its_adapter_names_a_backend() -> None:
    found = {name: named(text) for name, text in files()}
    for path, packages in PACKAGES.items():
        found[path] -= packages
    wrong = {
        name: sorted(said)
        for name, said in found.items()
        if len(said) > name.startswith("fixes/")  # a fix may be for one backend's own bug
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ('SITE = "attn.triton.init"', {"triton"}),
        ('BACKENDS = ("triton", "trtllm_mha")', {"triton", "trtllm_mha"}),
        ('f"{module}.TRTLLMHAAttnBackend"', {"trtllm_mha"}),
        ('class A:\n    """Of triton."""\nimport triton', set()),
        ('ID, OLD = "triton-decode-window", "SGLANG_TRTLLM_MHA_DEBUG"', set()),
    ],
)
def test_the_rule_sees_what_it_forbids(code: str, said: set[str]) -> None:
    assert named(code) == said


def test_the_table_of_attention_backends() -> None:
    page = (ROOT / "docs" / "supported.md").read_text()
    table = page.split("<!-- backends")[1].split("<!-- /backends -->")[0].splitlines()[1:]
    phases = ("prefill", "decode", "verify", "draft")
    expected = [table[0], table[1]]
    for adapter in adapters():
        guarded = ["guarded" if phase in adapter.phases else "no" for phase in phases]
        places = {place: [] for places in adapter.run.values() for place in places}
        for place, releases in places.items():
            releases += [release for release, where in adapter.run.items() if place in where]
        run = "; ".join(f"{place}: {', '.join(releases)}" for place, releases in places.items())
        expected.append(f"| {' | '.join([f'`{adapter.name}`', *guarded, run])} |")
    assert table == [*expected, "| any other | no | no | no | no | |"]


def test_page_table_was_run_where_one_of_its_backends_was() -> None:
    """``RUN`` says where the tracer was run; each adapter says on which backend that was."""
    run = {
        release: {place for adapter in adapters() for place in adapter.run.get(release, ())}
        for release in {release for adapter in adapters() for release in adapter.run}
    }
    assert run == {
        release: set(tracers["page-table"])
        for release, tracers in targets.RUN.items()
        if "page-table" in tracers
    }


def test_each_declared_site_is_one() -> None:
    for adapter in adapters():
        sites = (adapter.built, *adapter.sites, *adapter.fused_writes, adapter.metadata)
        some = filter(None, (adapter.replay, adapter.in_graph))
        assert {*sites, *some} <= targets.SITES.keys()
