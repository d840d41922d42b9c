"""Counts the requests that an idle server refuses for ever.

The situation: a request is refused for want of tokens (``PrefillAdder.add_one_req``), and no
request runs. The bug: it stays so in ``ROUNDS`` rounds of the scheduler in a row, and in none of
them a batch runs. So nobody computes anything, and nobody can give pages back. The upstream fix
(#32379) lowers the need, and makes a chunk shorter that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.history.counter import Counter, around

ROUNDS = 500


def install(counter: Counter) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler

    refused = 0  # rounds since the last batch

    @around(Scheduler, "run_batch")
    def run_batch(*_: Any, **__: Any) -> None:
        nonlocal refused
        refused = 0

    @around(PrefillAdder, "add_one_req")
    def add(adder: Any, *_: Any, **__: Any) -> Callable[[Any], None]:
        def then(result: Any) -> None:
            nonlocal refused
            running = adder.running_batch is not None and adder.running_batch.reqs
            if result.name != "NO_TOKEN" or adder.can_run_list or running:
                return
            refused += 1
            if refused == 1:
                counter.reached()
            elif refused == ROUNDS:
                counter.triggered(f"a request is refused in {ROUNDS} rounds, and nothing runs")

        return then
