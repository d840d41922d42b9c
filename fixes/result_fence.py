"""Lets a running forward read its tables before the result of a prefill rewrites them.

With overlap scheduling the host launches a decode step, and then processes the result of the
prefill before it. There the prefix cache gives the request pages that it had already, in place of
its own, and clears the entries of its own in the mapping to SWA pages. The decode step that was
just launched reads these very entries. Up to 0.5.17 SGLang waits for the forward's reads only at
the top of the next round, so the forward may find the mapping cleared. Then it reads page 0 in
place of tokens that are inside its window, and the answer is wrong. Nothing crashes. It needs a
forward that is late, and a prefix with pages that a running request has locked (upstream's #29352
and #31687). ``repro/suites/history/cases/unfenced_results.py`` holds the forward back: on H100 a
decode step then read page 0 in each of five runs, and in none with this fix.

The fix waits on SGLang's own barrier right after the launch, where the result of a prefill comes
next. Only the scheduling stream waits; the host does not.
"""

from __future__ import annotations

from typing import Any

from g4debug.fixes.base import Fix, after
from g4debug.fixes.source import source
from g4debug.hooking.table_barrier import wait_for_tables

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def after_run_batch(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs after ``Scheduler.run_batch``, which has launched a batch."""
    if scheduler.enable_overlap and scheduler._war_barrier_enabled:
        wait_for_tables(scheduler)
    return result


def still_broken() -> bool:
    """True if the event loop waits for the tables before it launches, and not after it."""
    loop = source(f"{SCHEDULER}.event_loop_overlap")
    barrier = loop.find("self._apply_war_barrier()")
    return 0 <= barrier < loop.find("self.run_batch(batch)")


FIX = Fix(
    id="result-fence",
    title="a prefill's result is processed only when the running forward has read its tables",
    seed="none; a case of the history suite",
    upstream="#31687 (in 0.5.18)",
    needs=">=0.5.14,<0.5.18",
    elsewhere={
        "<0.5.13": "SGLang has no barrier there that could be called earlier",
        ">=0.5.13,<0.5.14": "it was not run there",
        ">=0.5.18": "SGLang itself has its barrier right after the launch",
    },
    still_broken=still_broken,
    hooks=(after("scheduler.run_batch", after_run_batch),),
    purpose="correctness",
)
