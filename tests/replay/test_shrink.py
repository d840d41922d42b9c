"""What is left is enough, and nothing of it can be left out."""

from __future__ import annotations

import dataclasses
import json
import time
from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4debug.findings.tape import Abort, How, Recording, Request, Start, Why
from g4debug.replay.ddmin import last, shortest
from g4debug.replay.setting import CannotReplay
from g4debug.replay.shrink import Shown, Shrinking
from g4debug.replay.workload import LAGS, After, Workload

pytestmark = pytest.mark.once("it needs no SGLang")
PAGE = 64
SHARED = b"shared01"
ENDED, TOGETHER = After(0, After.ENDED), After(0, After.TOGETHER)


@given(st.integers(1, 200), st.data())
def test_what_is_left_of_a_list_is_what_is_needed(count: int, draw: st.DataObject) -> None:
    needed = draw.draw(st.sets(st.integers(1, count), min_size=1, max_size=5))

    def test(items: Sequence[int]) -> bool:
        return needed <= set(items)

    assert set(shortest(last(range(1, count + 1), test), test)) == needed


def recording(count: int = 8) -> Recording:
    """Requests with 4 pages and 20 more tokens, the first of which all share, and an abort."""
    requests = {}
    for n in range(1, count + 1):
        pages = [SHARED, *(b"page%02d%02d" % (n, k) for k in range(1, 4))]
        requests[n] = Request(
            id=n, round=10 * n, prompt=4 * PAGE + 20, longest=50, options=0, logprobs_from=-1,
            priority=0, hashes=b"".join(pages), output=30, how=How.LENGTH,
        )  # fmt: skip
    given = [*requests.values(), Abort(95, 3)]
    begins = Start(Why.START, 0, 0, 0, 0, 0.7, 0)
    return Recording(begins, requests, given, array("H", range(100)), {}, PAGE, False)


def shrunk(comes: Callable[[dict[int, Request], Workload], bool], **more: object) -> Shrinking:
    """The search for the smallest workload with which ``comes`` is true."""
    made = recording()
    reached = [{n: After.ENDED if n < place else 7 for n in range(1, place)} for place in range(10)]

    def try_it(workload: Workload) -> Shown | None:
        requests = {r.id: r for _, r in workload.requests(made)}
        return Shown(reached) if comes(requests, workload) else None

    search = Shrinking(made, try_it, time.monotonic() + 60, drafts=4)
    for name, value in more.items():
        setattr(search, name, value)
    search.run()
    return search


def test_of_events_those_are_left_that_are_needed() -> None:
    search = shrunk(lambda requests, workload: {2, 7} <= requests.keys())
    assert [r.id for _, r in search.requests] == [2, 7]
    assert len(search.now.keep) == 2
    assert search.whole
    search = shrunk(lambda requests, workload: 8 in workload.keep and 3 in requests)
    assert search.now.keep == (2, 8)  # the abort, and whose it is


def test_a_page_that_requests_share_is_left_out_of_all_of_them() -> None:
    def comes(requests: dict[int, Request], workload: Workload) -> bool:
        return {2, 7} <= requests.keys() and b"page0703" in requests[7].hashes

    (_, first), (_, second) = shrunk(comes).requests
    assert (first.prompt, first.hashes) == (1, b"")
    assert (second.prompt, second.hashes) == (PAGE, b"page0703")
    both = shrunk(
        lambda requests, _: sum(r.hashes.startswith(SHARED) for r in requests.values()) > 1
    )
    assert [r.prompt for _, r in both.requests] == [PAGE, PAGE]


def test_prompts_and_answers_get_as_short_as_they_can() -> None:
    def comes(requests: dict[int, Request], workload: Workload) -> bool:
        return 5 in requests and requests[5].prompt >= 2 * PAGE + 1 and requests[5].output >= 13

    search = shrunk(comes)
    ((_, request),) = search.requests
    assert (request.prompt, request.output, request.longest) == (2 * PAGE + 1, 13, 13)
    assert request.how is How.LENGTH


def test_an_event_comes_after_another_one_if_that_is_enough_with_each_lag() -> None:
    def alone(requests: dict[int, Request], workload: Workload) -> bool:
        return {2, 7} <= requests.keys()

    assert set(shrunk(alone).now.after.values()) == {ENDED}

    def together(requests: dict[int, Request], workload: Workload) -> bool:
        return alone(requests, workload) and workload.after.get(6) != ENDED

    search = shrunk(together)
    assert search.now.after == {1: ENDED, 6: TOGETHER}

    def lagging(requests: dict[int, Request], workload: Workload) -> bool:
        exact = 6 not in workload.after
        return alone(requests, workload) and (exact or workload.lag < max(LAGS))

    search = shrunk(lagging)
    assert search.now.after == {1: ENDED}  # 7 must come in its exact round
    assert search.whole


def test_a_finding_that_comes_whatever_is_accepted_is_told_from_one_that_does_not() -> None:
    made = shrunk(lambda requests, workload: 2 in requests)
    assert made.now.accepted == (1, 4)
    made = shrunk(lambda requests, workload: 2 in requests and workload.accepted != (1,))
    assert made.now.accepted == ()


def test_nothing_is_left_if_even_all_do_not_show_it() -> None:
    search = shrunk(lambda requests, workload: False)
    assert search.best is None
    assert search.tried == 1


@pytest.mark.parametrize("why", ["there was no time", "stopped by Ctrl-C", "its process has ended"])
def test_it_stops_and_keeps_what_it_has(why: str) -> None:
    tried = []

    def comes(requests: dict[int, Request], workload: Workload) -> bool:
        tried.append(workload)
        if len(tried) == 5 and why == "stopped by Ctrl-C":
            raise KeyboardInterrupt
        if len(tried) == 5 and why == "its process has ended":
            raise CannotReplay(why)
        if len(tried) == 5:
            time.sleep(0.3)
        return len(requests) > 2

    made = recording()

    def try_it(workload: Workload) -> Shown | None:
        requests = {r.id: r for _, r in workload.requests(made)}
        return Shown(()) if comes(requests, workload) else None

    search = Shrinking(made, try_it, time.monotonic() + 0.3)
    assert search.run() is not None
    assert len(search.requests) == 3
    assert not search.whole
    assert search.why.startswith(why)
    assert len(tried) == 5


def test_a_workload_is_the_same_as_json() -> None:
    one = Workload((1, 2), frozenset({SHARED}), {1: 2}, {3: 4}, {2: After(1, 5)}, (4,), 3)
    assert Workload.of(json.loads(json.dumps(one.plain()))) == one
    assert dataclasses.replace(one, lag=0) != one
