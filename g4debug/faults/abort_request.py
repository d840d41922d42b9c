"""Aborts a running request before its verify. This is a stress test: nothing may go wrong.

It sets ``to_finish``, as ``Scheduler.abort_request`` does with a running request, at the worst
moment: after the draft has guessed and before the target verifies.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import put
from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    @put(injection.before, "verify")
    def before_verify(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        running = [r for r in batch.reqs if not r.finished() and r.to_finish is None]
        if not running or injection.fire() is None:
            return
        request = injection.random.choice(running)
        request.to_finish = FINISH_ABORT()
        injection.log(f"request {request.rid}")


FAULT = Fault(
    id="abort-request",
    title="a running request is aborted in the middle of its verify",
    tasks={"on": "abort one running request"},
    caught_by=(),
    drills=("3*on",),
)
