"""The name of a launch: the same in all processes of one server, another in the next."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from g4debug.dumps import launch

BEGIN = "from g4debug.dumps import launch; print(launch.begin(True)); print(launch.begin(True))"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.VARIABLE, raising=False)


def begun(**environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.split()
    assert first == second  # SGLang may load its plugins twice
    return first


def test_each_server_has_a_name_of_its_own() -> None:
    first, second = begun(), begun()
    assert first.startswith("auto-")
    assert first != second
    # A server that a process of another server starts is another launch.
    assert begun(G4DEBUG_LAUNCH=first) not in (first, "")
    assert begun(G4DEBUG_LAUNCH="canary-3") == "canary-3"


def child(queue: multiprocessing.Queue[str]) -> None:
    queue.put(launch.begin(False))


def test_the_processes_of_a_server_inherit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By spawn, as SGLang starts its schedulers."""
    name = launch.begin(True)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=120) == name == os.environ[launch.VARIABLE]
    process.join(60)
    monkeypatch.setenv(launch.VARIABLE, name)  # so that it is taken away again


def test_the_nodes_of_a_server_share_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def scheduler(**arguments: object) -> SimpleNamespace:
        return SimpleNamespace(server_args=SimpleNamespace(**arguments))

    two = scheduler(nnodes=2, dist_init_addr="10.0.0.1:5000")
    other = scheduler(nnodes=2, dist_init_addr="10.0.0.1:5001")
    alone = scheduler(nnodes=1, dist_init_addr="10.0.0.1:5000")
    monkeypatch.setenv(launch.VARIABLE, "auto-1")
    first = launch.of(two)
    monkeypatch.setenv(launch.VARIABLE, "auto-2")
    assert launch.of(two) == first
    assert first.startswith("nodes-")
    assert "10.0" not in first
    assert launch.of(other) != first
    assert launch.of(alone) == launch.of(None) == launch.of(scheduler()) == "auto-2"
    monkeypatch.setenv(launch.VARIABLE, "mine")
    assert launch.of(two) == "mine"
