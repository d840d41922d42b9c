"""A replay ends before the machine's memory is full, and says so."""

from __future__ import annotations

import io
import json
import mmap
import os
import time
from typing import Any

import pytest

from g4debug.replay import memory
from g4debug.replay.child import Replayer

pytestmark = pytest.mark.once("memory is measured without SGLang")


def waiting(most: int) -> tuple[Any, io.StringIO]:
    """A process that has started its scheduler, as far as it waits for its forks."""
    replayer = Replayer.__new__(Replayer)
    replayer.most, replayer.answers, replayer.steps = most, io.StringIO(), mmap.mmap(-1, 8)
    return replayer, replayer.answers


@pytest.mark.parametrize("more", [0, 300 << 20], ids=["little", "much"])
def test_a_fork_that_takes_too_much_is_ended_with_a_reason(more: int) -> None:
    replayer, answers = waiting(memory.taken(os.getpid()) + (150 << 20))
    pid = os.fork()
    if not pid:
        held = bytearray(more)
        held[::4096] = b"1" * len(held[::4096])
        time.sleep(90 if more else 0)
        os._exit(0)
    replayer._wait(pid, {"seconds": 60, "result": "x"})
    news = json.loads(answers.getvalue().splitlines()[-1])
    assert ("GiB of memory" in news["large"]) == bool(more)


def test_the_limit_is_a_part_of_what_is_free() -> None:
    assert 0 < memory.most() < 1 << 44
    assert memory.taken(os.getpid()) > 1 << 20
    assert memory.taken(1 << 30) == 0
