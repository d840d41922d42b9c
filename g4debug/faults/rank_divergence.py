"""Lets one tensor-parallel rank decide for itself, as no rank may.

Either it takes two requests that came together in the opposite order: then the ranks add up the
rows of different requests, and answers are wrong until their batches no longer fit together, which
is an error of the collectives that names no cause. Or it ends a request that the others go on with,
as a clock that only it has asked would. Rank 0 is left alone, because it is what the others are
compared with.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    tasks = {action.task for action in injection.chain.actions}

    @injection.after("scheduler.recv_requests")
    def after_recv(result: Any, *args: Any, **kwargs: Any) -> Any:
        if "on" not in tasks or injection.clock.rank < 1 or not isinstance(result, list):
            return result
        # A list of prompts may come as one message that has them in a list of its own.
        lists = [result, *(m.batch for m in result if isinstance(getattr(m, "batch", None), list))]
        for received in lists:
            places = [i for i, message in enumerate(received) if hasattr(message, "input_ids")]
            if len(places) > 1 and injection.fire() is not None:
                one, two = places[:2]
                received[one], received[two] = received[two], received[one]
                injection.log(f"{received[two].rid} comes after {received[one].rid}")
                break
        return result

    @injection.before("scheduler.run_batch")
    def before_step(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if "abort" not in tasks or injection.clock.rank < 1 or not batch.forward_mode.is_decode():
            return
        running = [r for r in batch.reqs if not r.finished() and r.to_finish is None]
        if len(running) < 2 or injection.fire() is None:
            return
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        request = running[-1]
        request.to_finish = FINISH_ABORT()
        injection.log(f"request {request.rid} is aborted on this rank")


FAULT = Fault(
    id="rank-divergence",
    title="a tensor-parallel rank does something else than rank 0",
    tasks={
        "on": "it takes two requests that came together in the opposite order",
        "abort": "it aborts a running request that the others go on with",
    },
    caught_by=("rank-divergence",),
    drills=("1*on", "1*abort"),
    ranks=2,
)
