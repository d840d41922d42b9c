"""``g4debug trace`` of a hostile dump: twice as many events take about twice as long, not four."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable

import pytest
from sample_trap import sample_record

from g4debug.cli import CliError
from g4debug.cli.trace import one_of
from g4debug.findings.record import PageEvent, RequestEvent, Step, TrapRecord
from g4debug.reporters import trace, way

RID = "r"
SMALL, LARGE = 500, 4_000  # events


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


def seconds(made: TrapRecord, everything: bool) -> float:
    best = 99.0
    for _ in range(2):
        begin = time.process_time()
        known = way.known_requests(made)
        told = way.follow(made, one_of(known, RID, "x"), everything)
        trace.render_json(told, io.StringIO())
        best = min(best, time.process_time() - begin)
    return best


@pytest.mark.parametrize("everything", [False, True], ids=["", "all"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_it_is_linear(kind, everything):
    small, large = (seconds(HOSTILE[kind](n), everything) for n in (SMALL, LARGE))
    print(f"{kind}: {small:.2f} s for {SMALL}, {large:.2f} s for {LARGE}")
    assert large < 1 + 2.5 * small * LARGE / SMALL


def test_an_id_that_is_not_there_is_looked_for_in_no_time():
    known = [f"{i:05}" + "x" * 2_000 for i in range(20_000)]
    begin = time.process_time()
    with pytest.raises(CliError):
        one_of(known, "y" * 10_000, "x")
    assert time.process_time() - begin < 5
