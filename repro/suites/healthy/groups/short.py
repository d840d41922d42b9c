"""The short subset, which is a test: what is most likely to break, on one engine."""

from __future__ import annotations

from suites.healthy.groups import control, endings, sessions
from suites.healthy.workload import Workload, with_mtp

GROUPS = (
    with_mtp(
        "short",
        "a short subset, MTP, prefix cache",
        (
            Workload("end of sequence", "by EOS and by stop token ids", endings.eos),
            Workload(
                "aborts while waiting",
                "six requests of 16",
                endings.aborted_while_waiting,
                compare=False,
            ),
            Workload("sessions", "three at a time, beside others", sessions.sessions),
            Workload(
                "pause, retract",
                "in the middle of answers",
                control.paused_and_retracted,
                compare=False,
            ),
            Workload("flush_cache", "at idle; refused while busy", control.flushed),
        ),
        short=True,
    ),
)
