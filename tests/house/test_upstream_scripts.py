"""docs/upstream/*.py, which ``g4debug replay --script`` wrote: each one runs without g4debug.

Here they run with a stand-in for SGLang. Whether a bug comes is not seen so: that takes an engine.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import runpy
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "docs" / "upstream").glob("*.py"))
PAGE = (ROOT / "docs" / "replay.md").read_text()
each = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)


def imported(path: Path) -> set[str]:
    """The packages that a script imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


class Engine:
    """Answers as long as it is asked to, one token after the other."""

    made: list[Engine]

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.asked, self.ended = arguments, [], 0
        self.loop = asyncio.new_event_loop()
        self.made.append(self)

    async def async_generate(self, **asked: Any) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(asked)

        async def parts() -> AsyncIterator[dict[str, Any]]:
            for n in range(asked["sampling_params"]["max_new_tokens"]):
                await asyncio.sleep(0)
                yield {"output_ids": list(range(n + 1))}

        return parts()

    def shutdown(self) -> None:
        self.ended += 1
        self.loop.close()


def run(path: Path, patch: pytest.MonkeyPatch, *arguments: str) -> Engine:
    """The engine with which a script ran to its end."""
    at_once, made = asyncio.sleep, type("Engine", (Engine,), {"made": []})
    stand_in = ModuleType("sglang")
    stand_in.Engine = made  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "sglang", stand_in)
    patch.setattr(asyncio, "sleep", lambda _seconds: at_once(0))
    patch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    (engine,) = made.made
    return engine


def test_there_are_some() -> None:
    assert SCRIPTS


@each
def test_a_script_imports_sglang_and_nothing_else_that_is_installed(path: Path) -> None:
    assert imported(path) - sys.stdlib_module_names == {"sglang"}


@pytest.mark.once("SGLang is a stand-in here")
@each
def test_a_script_runs_to_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = run(path, monkeypatch, "model_path=here", "device=cpu")
    assert capsys.readouterr().out.splitlines()[-1] == "completed"
    assert engine.ended == 1
    assert engine.arguments["model_path"] == "here"
    prompts = [asked["input_ids"] for asked in engine.asked]
    assert prompts
    assert all(type(token) is int for prompt in prompts for token in prompt)


@pytest.mark.once("the scripts are of the newest release")
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
@each
def test_what_a_script_gives_to_sglang_is_known_to_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, sglang: Any
) -> None:
    from sglang.srt.entrypoints.engine import Engine as Real
    from sglang.srt.server_args import ServerArgs

    with monkeypatch.context() as patch:
        engine = run(path, patch)
    assert engine.arguments.keys() <= inspect.signature(ServerArgs).parameters.keys()
    known = inspect.signature(Real.async_generate).parameters
    assert {name for asked in engine.asked for name in asked} <= known.keys()


@each
def test_a_script_says_of_which_release_it_is_and_its_page_leads_to_it(path: Path) -> None:
    head = ast.get_docstring(ast.parse(path.read_text()))
    assert head is not None
    assert f"]({path.relative_to(ROOT / 'docs')})" in PAGE
    (row,) = (line for line in PAGE.splitlines() if f"({path.relative_to(ROOT / 'docs')})" in line)
    assert f"SGLang {row.split('|')[1].strip()}" in head
