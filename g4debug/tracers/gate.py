"""The gate: a combination that was never run is not judged in a mode that does more than report.

A finding stops a server in mode ``raise``, and changes what its kernels get in mode ``contain``.
Where a model of that class, an attention backend or a draft was never run, a finding could be
false, and would harm a healthy server. So such a start is refused. Which tracers were run on which
release and GPU is known without a model (:func:`g4debug.plugin.refuse_if_not_run`). What the server
runs is known only in its scheduler: a part of it before the weights are loaded, and all when the
pools and the runners are there. Then one line tells what is judged in this server. What is not
known by then, also by a failure of ours, is refused as what was never run.

The flight recorder keeps what happens, whatever that is, so it refuses no start. Nor does
``SGLANG_TRTLLM_MHA_DEBUG=watch``, which then only reports, as in mode ``log``: also in CUDA graphs
that were captured before it was known.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from g4debug.combinations.refusal import failure, refusal
from g4debug.combinations.seen import planned, running
from g4debug.hooking.arguments import argument
from g4debug.tracers.base import Context, Tracer

NOT_RUN = "it was never run with this model, attention backend and draft"
NOT_TOLD = "what g4debug could not tell"
logger = logging.getLogger("g4debug")


class Gate:
    """context: of whoever records the steps. on_cpu: SGLang runs on the CPU engine."""

    def __init__(self, context: Context, tracers: Sequence[Tracer], on_cpu: bool) -> None:
        self.context = context
        self.tracers = [t for t in tracers if t.judges]
        self.on_cpu = on_cpu

    def install(self) -> None:
        """After the tracers, so that all of them have said what they do not judge."""
        self.context.before("runner.init", self.before_runner)
        self.context.after("scheduler.init", self.after_scheduler)

    def before_runner(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        try:
            config = argument(args, kwargs, 0, "model_config")
            draft = args[5] if len(args) > 5 else kwargs.get("is_draft_worker", False)
            found = planned(self.context.recorder.scheduler, config)
            why = "" if draft else refusal(found, self.context.settings, self.on_cpu)
        except Exception as e:  # all is asked again when the scheduler is complete
            logger.debug("g4debug: what this server will run is not known yet: %r", e)
            return
        self.judge(why)

    def after_scheduler(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        status, said = self.context.recorder.status, NOT_TOLD
        try:
            found = running(scheduler)
            said = str(found)
            why = refusal(found, self.context.settings, self.on_cpu, whole=True)
        except Exception as e:
            logger.exception("g4debug: what this server runs cannot be told")
            why = failure(e, self.context.settings)
        if not self.judge(why):
            for tracer in self.tracers:
                status.part(tracer.id).limit("it may be wrong", NOT_RUN, quiet=True)
        status.serves = said
        print(f"g4debug: this server runs {said}. {status.judged()}", file=sys.stderr, flush=True)
        return result

    def judge(self, why: str) -> bool:
        """True if nothing is refused. Raises SystemExit if it is, and nothing lets it go on.

        why: the refusal, '' for none.
        """
        settings = self.context.settings
        if not why or not self.tracers:
            return True
        if settings.watch and not settings.takes_the_risk:
            self.context.trap.report_only()
            for tracer in self.tracers:
                self.context.recorder.status.part(tracer.id).mode = "log"
        elif not settings.takes_the_risk:
            raise SystemExit(f"g4debug: {why}")
        return False
