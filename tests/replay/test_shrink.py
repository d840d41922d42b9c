"""What is left is enough, and nothing of it can be left out."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4debug.replay.shrink import Search

pytestmark = pytest.mark.once("it needs no SGLang")


@given(st.integers(1, 200), st.data())
def test_what_is_left_is_what_is_needed(count: int, draw: st.DataObject) -> None:
    needed = draw.draw(st.sets(st.integers(1, count), min_size=1, max_size=5))
    search = Search(lambda items: needed <= set(items), time.monotonic() + 60)
    assert search.run(range(1, count + 1)) == tuple(sorted(needed))
    assert not search.interrupted


def test_nothing_is_said_if_even_all_do_not_show_it() -> None:
    assert Search(lambda items: False, time.monotonic() + 60).run(range(9)) == ()


def test_it_stops_in_time_and_keeps_what_it_has() -> None:
    tried = []

    def test(items: tuple[int, ...]) -> bool:
        tried.append(items)
        if len(tried) == 4:
            search.until = 0
        return len(items) > 2

    search = Search(test, time.monotonic() + 60)
    assert len(search.run(range(100))) == 4
    assert search.interrupted


def test_ctrl_c_keeps_what_it_has() -> None:
    def test(items: tuple[int, ...]) -> bool:
        if len(items) < 10:
            raise KeyboardInterrupt
        return True

    search = Search(test, time.monotonic() + 60)
    assert search.run(range(100)) == tuple(range(100))
    assert search.interrupted
