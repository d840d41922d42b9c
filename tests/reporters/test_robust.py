"""Whatever a record holds, and however two of them differ, every reporter gives an answer."""

from __future__ import annotations

import dataclasses
import io

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_strategies import TEXT, records

from g4debug.cli import make_console
from g4debug.findings.record import Holding, PageEvent, Transition, TrapRecord
from g4debug.reporters import compare, diff, html, terminal

pytestmark = pytest.mark.once("a report is made without SGLang")

ANY = st.integers() | st.just(1 << 2000)
LONG = TEXT | st.sampled_from(["x" * 300, "word " * 99, "\n\u202e\x1b[0m", "  "])
pages = st.lists(ANY, max_size=3).map(tuple)
events = st.builds(PageEvent, ANY, LONG, TEXT, pages, ANY, LONG, LONG, LONG)
histories = st.fixed_dictionaries(
    {
        "events": st.lists(events, max_size=3).map(tuple),
        "allocator": st.lists(events, max_size=2).map(lambda e: tuple(e) * 10),
        "transitions": st.lists(
            st.builds(Transition, ANY, LONG, LONG, LONG, ANY, LONG, st.booleans()), max_size=2
        ).map(lambda t: tuple(t) * 7),
        "holdings": st.lists(
            st.builds(Holding, TEXT, pages, ANY, TEXT, LONG, LONG, LONG, ANY), max_size=2
        ).map(lambda h: tuple(h) * 5),
    }
)
wholes = st.builds(lambda r, h: dataclasses.replace(r, **h), records, histories)


SLOW = [HealthCheck.data_too_large, HealthCheck.too_slow]


@settings(deadline=None, max_examples=examples(50), suppress_health_check=SLOW)
@given(wholes)
def test_any_record_makes_a_page_and_a_whole_report(record: TrapRecord) -> None:
    page = html.render(record)
    assert page.startswith("<!DOCTYPE html>")
    assert page.rstrip().endswith("</html>")
    stream = io.StringIO()
    console = make_console(width=80, color=False, stream=stream)
    terminal.render(record, console, rows=None, everything=True)
    assert "\x1b" not in stream.getvalue()


@settings(deadline=None, max_examples=examples(50), suppress_health_check=SLOW)
@given(wholes, wholes)
def test_any_two_records_can_be_compared(a: TrapRecord, b: TrapRecord) -> None:
    assert not any(p.changes for p in compare.compare(a, a))
    there = {p.name: len(p.changes) for p in compare.compare(a, b)}
    back = {p.name: len(p.changes) for p in compare.compare(b, a)}
    assert there == back
    stream = io.StringIO()
    dumps = [("a.pt", a), ("b.pt", b)]
    diff.render(dumps, compare.compare(a, b), make_console(width=60, stream=stream))
    assert "\x1b" not in stream.getvalue()
    diff.render_json(dumps, compare.compare(a, b), stream)
