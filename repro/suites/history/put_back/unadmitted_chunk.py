"""Put back: the scheduler takes each chunk that it asked for to be scheduled.

Before upstream's #24252 it did not ask, and handed the request over in every round.
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler.get_next_batch_to_run

    @functools.wraps(original)
    def as_before(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler._chunked_req_scheduled_last_iter = scheduler.chunked_req is not None
        return original(scheduler, *args, **kwargs)

    Scheduler.get_next_batch_to_run = as_before
