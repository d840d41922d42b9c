"""A repro script runs beside the tests that need nothing of it: one engine keeps one core busy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

REPRO = Path(__file__).parents[2] / "repro"
LIMIT = 600  # seconds that one script may take
Done = subprocess.CompletedProcess[str]


def _run(command: tuple[str, ...]) -> Done:
    line = [sys.executable, str(REPRO / command[0]), *command[1:]]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.fixture(scope="session", autouse=True)
def _scripts(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Done]]]:
    """The SCRIPT of each module whose tests are about to run, one after the other."""
    wanted = {
        item.module.__name__: item.module.SCRIPT
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and hasattr(item.module, "SCRIPT")
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    }
    with ThreadPoolExecutor(1) as pool:
        futures = {name: pool.submit(_run, command) for name, command in wanted.items()}
        yield futures
        for future in futures.values():  # where the tests were stopped before
            future.cancel()


@pytest.fixture
def script(request: pytest.FixtureRequest, _scripts: dict[str, Future[Done]]) -> Callable[[], Done]:
    """Waits for the module's SCRIPT."""
    return lambda: _scripts[request.module.__name__].result()
