"""``g4debug trace`` of a hostile dump: four times as many events take about four times the work.

The work is counted in Python's own instructions, so that no clock decides.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest
from sample_trap import sample_record

from g4debug.cli import CliError
from g4debug.cli.trace import one_of
from g4debug.findings.record import PageEvent, RequestEvent, Step, TrapRecord
from g4debug.reporters import trace, way

pytestmark = pytest.mark.once("a report is made without SGLang")

RID = "r"
SMALL, LARGE = 100, 400  # events


def record(**parts: object) -> TrapRecord:
    bare = {"requests": (), "steps": (), "allocator": (), "events": (), "tape": None}
    return dataclasses.replace(sample_record(), **{**bare, **parts})


def lives(n: int, wide: bool = True) -> tuple[RequestEvent, ...]:
    """Prefills and retractions, one after the other. wide: with decode steps between them."""
    found = [RequestEvent(0, 1, RID, "arrives", tokens=9, number=1)]
    for i in range(n):
        step, at = 1 + (2 + wide) * i, 2 + 3 * i
        found.append(RequestEvent(step, at, RID, "chunk", begin=1, end=9, tokens=9, output=1))
        found.append(RequestEvent(step + 1 + wide, at + 1, RID, "retracted", output=1))
    return tuple(found)


def steps(n: int) -> tuple[Step, ...]:
    return tuple(Step(i, "DECODE", (RID,), (9,), time_ns=i + 1) for i in range(1, n))


def pages(n: int, kind: str = "free", **more: object) -> tuple[PageEvent, ...]:
    caller = "x.py:1 f"
    return tuple(
        PageEvent(i, kind, more.get("pool", f"full {i}"), (i,), 1, RID, caller) for i in range(n)
    )


HOSTILE: dict[str, Callable[[int], TrapRecord]] = {
    "retractions": lambda n: record(requests=lives(n)),
    "retractions and steps": lambda n: record(requests=lives(n), steps=steps(3 * n)),
    "steps beside its events": lambda n: record(requests=lives(n, False), steps=steps(4 * n)),
    "frees between its events": lambda n: record(requests=lives(n), allocator=pages(n)),
    "pages that it takes": lambda n: record(
        requests=lives(n), allocator=pages(n, "extend", pool="full")
    ),
    "a pool for each event": lambda n: record(requests=lives(1), allocator=pages(n)),
    "events out of order": lambda n: record(requests=lives(n), allocator=pages(n)[::-1]),
    "other requests": lambda n: record(
        requests=(
            *lives(1),
            *(RequestEvent(1, 1, f"o{i}", "arrives", tokens=9, number=i + 2) for i in range(n)),
        )
    ),
}


def instructions(work: Callable[[], object]) -> int:
    """How many instructions of Python g4debug runs for it."""
    count = 0

    def on_event(frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        nonlocal count
        if event == "call" and "g4debug" not in frame.f_globals.get("__name__", ""):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def told(made: TrapRecord, everything: bool) -> None:
    known = way.known_requests(made)
    trace.render_json(way.follow(made, one_of(known, RID, "x"), everything), io.StringIO())


@pytest.mark.parametrize("everything", [False, True], ids=["", "all"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_it_is_linear(kind, everything):
    small, large = (
        instructions(partial(told, HOSTILE[kind](n), everything)) for n in (SMALL, LARGE)
    )
    assert small > SMALL  # it was counted
    assert large < 1.6 * small * LARGE / SMALL


def test_work_that_grows_with_the_square_is_seen():
    """Also where it is one line."""
    namespace = {"__name__": "g4debug.square"}
    exec("def work(n):\n    return [a + b for a in range(n) for b in range(n)]", namespace)
    small, large = (instructions(partial(namespace["work"], n)) for n in (SMALL, LARGE))
    assert large > 10 * small


def test_an_id_that_is_not_there_is_looked_for_in_no_time():
    known = [f"{i:05}" + "x" * 2_000 for i in range(20_000)]
    begin = time.process_time()
    with pytest.raises(CliError):
        one_of(known, "y" * 10_000, "x")
    assert time.process_time() - begin < 60  # minutes, if each were compared with each
