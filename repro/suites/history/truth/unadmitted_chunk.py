"""Counts the hand-overs of tokens that have no KV.

The situation: the next chunk of a prompt is not admitted (``PrefillAdder.add_chunked_req`` returns
the request and puts it into no batch). The bug: the scheduler then hands the request to the prefix
cache (``Scheduler.stash_chunked_request``) with the tokens of that chunk. The upstream fix (#24252)
hands it over only if the chunk was scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.history.counter import Counter, around


def install(counter: Counter) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler

    parked: set[str] = set()  # requests whose last chunk was not admitted

    @around(PrefillAdder, "add_chunked_req")
    def add(adder: Any, request: Any) -> Callable[[Any], None]:
        def then(_goes_on: Any) -> None:
            if any(r is request for r in adder.can_run_list):
                parked.discard(request.rid)
            elif request.rid not in parked:
                parked.add(request.rid)
                counter.reached()

        return then

    @around(Scheduler, "stash_chunked_request")
    def stash(_scheduler: Any, request: Any) -> None:
        has, given = request.kv_committed_len, len(request.fill_ids)
        if request.rid in parked and given > has:
            counter.triggered(f"{given} tokens are handed over, and {has} have KV")
