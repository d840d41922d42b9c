"""The short subset, which is a test: the workloads that are most likely to break."""

from __future__ import annotations

from dataclasses import replace

from suites.healthy.groups import control, endings, sessions
from suites.healthy.workload import with_mtp

GROUPS = (
    with_mtp(
        "short",
        "a short subset, MTP, prefix cache",
        (
            replace(endings.eos, what="end of sequence", how="by EOS and by stop token ids"),
            replace(endings.aborted_while_waiting, how="six requests of 16"),
            replace(sessions.sessions, how="three at a time, beside others"),
            replace(control.paused_and_retracted, how="in the middle of answers"),
            replace(control.flushed, how="at idle; refused while busy"),
        ),
        short=True,
    ),
)
