"""The gate: a combination that was never run is not judged in a mode that does more than report.

A finding stops a server in mode ``raise``, and changes what its kernels get in mode ``contain``.
Where a model of that class, an attention backend or a draft was never run, a finding could be
false, and would harm a healthy server. So such a start is refused. Which tracers were run on which
release and GPU is known without a model (:func:`g4debug.plugin.refuse_if_not_run`). What the server
runs is known only in its scheduler: a part of it before the weights are loaded, and all when the
pools and the runners are there. Then one line tells what is judged in this server.

The flight recorder keeps what happens, whatever that is, so it refuses no start. Nor does
``SGLANG_TRTLLM_MHA_DEBUG=watch``, which then only reports, as in mode ``log``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from g4debug.combinations.refusal import refusal
from g4debug.combinations.seen import Combination, planned, running
from g4debug.hooking.arguments import argument
from g4debug.tracers.base import Context, Tracer

NOT_RUN = "it was never run with this model, attention backend and draft"


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
        except KeyError:
            return
        draft = args[5] if len(args) > 5 else kwargs.get("is_draft_worker", False)
        if not draft:
            self.judge(planned(self.context.recorder.scheduler, config))

    def after_scheduler(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        found = running(scheduler)
        if not self.judge(found):
            for tracer in self.tracers:
                self.context.recorder.status.part(tracer.id).limit(
                    "it may be wrong", NOT_RUN, quiet=True
                )
        status = self.context.recorder.status
        status.serves = str(found)
        print(f"g4debug: this server runs {found}. {status.judged()}", file=sys.stderr, flush=True)
        return result

    def judge(self, found: Combination) -> bool:
        """True if this combination was run, as far as it is known. Raises SystemExit if refused."""
        refused = refusal(found, self.context.settings, self.on_cpu) if self.tracers else ""
        settings = self.context.settings
        if refused and settings.watch and not settings.takes_the_risk:
            self.context.trap.report_only()
            for tracer in self.tracers:
                self.context.recorder.status.part(tracer.id).mode = "log"
        elif refused and not settings.takes_the_risk:
            raise SystemExit(f"g4debug: {refused}")
        return not refused
