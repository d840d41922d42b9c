"""A replay ends before the machine's memory is full, and says so."""

from __future__ import annotations

import io
import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest

from g4debug.findings import process_end
from g4debug.replay import memory
from g4debug.replay.child import Replayer

pytestmark = pytest.mark.once("memory is measured without SGLang")


def waiting(most: int) -> tuple[Any, io.StringIO]:
    """A process that has started its scheduler, as far as it waits for its forks."""
    replayer = Replayer.__new__(Replayer)
    replayer.most, replayer.answers, replayer.steps = most, io.StringIO(), mmap.mmap(-1, 8)
    return replayer, replayer.answers


@pytest.mark.parametrize("much", [False, True], ids=["little", "much"])
def test_a_fork_that_takes_too_much_is_ended_with_a_reason(much: bool, tmp_path: Path) -> None:
    # What a fork has not touched does not count as its own, so it must take that much again.
    mine = memory.taken(os.getpid())
    replayer, answers = waiting(mine + (50 << 20))
    more = mine + (100 << 20) if much else 0
    pid = os.fork()
    if not pid:
        held = bytearray(more)
        held[::4096] = b"1" * len(held[::4096])
        time.sleep(90 if much else 0)
        os._exit(0)
    stop = tmp_path / "stop"
    replayer._wait(pid, {"seconds": 60, "result": "x", "stop": str(stop), "workload": None})
    news = json.loads(answers.getvalue().splitlines()[-1])
    assert ("GiB of memory" in news["large"]) == much


def test_a_container_has_less_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit may be that of a cgroup above. Files that nobody uses are as good as free."""
    machine = memory.most()
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.setattr(process_end, "CGROUPS", tmp_path)
    monkeypatch.setattr(process_end, "cgroups", lambda: [(inner, "memory.events")])
    (inner / "memory.max").write_text("max\n")
    assert memory.most() <= machine + (1 << 30)
    (tmp_path / "a" / "memory.max").write_text(f"{100 << 20}\n")
    (tmp_path / "a" / "memory.current").write_text(f"{70 << 20}\n")
    (tmp_path / "a" / "memory.stat").write_text(f"file 9\ninactive_file {10 << 20}\n")
    assert memory.most() == int(memory.SHARE * (40 << 20))
    (tmp_path / "a" / "memory.current").write_text(f"{200 << 20}\n")
    assert memory.most() == 0


def test_the_limit_is_a_part_of_what_is_free() -> None:
    assert 0 < memory.most() < 1 << 44
    assert memory.taken(os.getpid()) > 1 << 20
    assert memory.taken(1 << 30) == 0
