"""Counts the prompts that are parked for ever.

The situation: the next chunk of a prompt is not admitted (``PrefillAdder.add_chunked_req`` returns
the request and puts it into no batch). The bug: it stays so in ``ROUNDS`` rounds of the scheduler
in a row, and in none of them a batch runs. So nobody computes anything, and nobody can give pages
back. The upstream fix (#36458) gives back what lies behind the prompt's window before it asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.history.counter import Counter, around

ROUNDS = 500


def install(counter: Counter) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler

    parked = 0  # rounds since the last batch

    @around(Scheduler, "run_batch")
    def run_batch(*_: Any, **__: Any) -> None:
        nonlocal parked
        parked = 0

    @around(PrefillAdder, "add_chunked_req")
    def add(adder: Any, request: Any) -> Callable[[Any], None]:
        def then(goes_on: Any) -> None:
            nonlocal parked
            if goes_on is not request or any(r is request for r in adder.can_run_list):
                return
            parked += 1
            if parked == 1:
                counter.reached()
            elif parked == ROUNDS:
                counter.triggered(f"a prompt is not admitted in {ROUNDS} rounds, and nothing runs")

        return then
