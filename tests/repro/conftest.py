"""A repro script runs beside the tests that need nothing of it: one engine keeps one core busy.

Under pytest-xdist the other workers do that. There a worker knows all items, not which are its
own, so a script starts when its test asks for it, and never twice.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REPRO = HERE.parents[1] / "repro"
LIMIT = 1800  # seconds that one script may take
Done = subprocess.CompletedProcess[str]


def _run(command: tuple[str, ...]) -> Done:
    line = [sys.executable, str(REPRO / command[0]), *command[1:]]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, check=False)


Start = Callable[[tuple[str, ...]], Future[Done]]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """``suite("matrix.drill")``: a module of ``repro/suites``."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    return lambda name: importlib.import_module(f"suites.{name}")


@pytest.fixture(scope="session", autouse=True)
def _start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Runs scripts one after the other, each once; those that tests will ask for, ahead."""
    wanted = {
        item.module.SCRIPT: None
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path.is_relative_to(HERE)  # elsewhere a parameter may have this name
        and "script" in item.fixturenames
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    }
    futures: dict[tuple[str, ...], Future[Done]] = {}
    with ThreadPoolExecutor(1) as pool:

        def start(command: tuple[str, ...]) -> Future[Done]:
            return futures.get(command) or futures.setdefault(command, pool.submit(_run, command))

        if not hasattr(request.config, "workerinput"):
            for command in wanted:
                start(command)
        yield start
        for future in futures.values():  # where the tests were stopped before
            future.cancel()


@pytest.fixture
def script(request: pytest.FixtureRequest, _start: Start) -> Callable[[], Done]:
    """Waits for the module's SCRIPT."""
    return lambda: _start(request.module.SCRIPT).result()


@pytest.fixture
def arms(script: Callable[[], Done]) -> Callable[[], dict[str, Any]]:
    """Waits for the module's SCRIPT with --json, all of whose four variants must be good."""

    def found() -> dict[str, Any]:
        done = script()
        assert done.returncode == 0, done.stderr[-3000:]
        told: dict[str, Any] = json.loads(done.stdout)["arms"]
        assert list(told) == ["clean", "broken", "diagnosed", "fixed"]
        return told

    return found
