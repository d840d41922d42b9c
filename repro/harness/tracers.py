"""Which tracers a script arms, and their status while a server runs."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from g4debug import discovery
from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Finding

COMPARES = "rank-divergence"  # ranks.py and tests/tracers/rank_divergence have two ranks
# It makes no checks: it keeps steps, and its dump is of a server that died of something else.
RECORDS = "flight-recorder"
_STANDS = "The scheduler hangs"  # the entry of TRIAGE.md on servers that live and serve nobody
PATIENCE = 10.0  # seconds; a scheduler shows its status once in a second


def on_one_rank() -> tuple[str, ...]:
    """Every tracer that has something to do where there is one rank."""
    return tuple(t for t in discovery.names("tracer") if t != COMPARES)


def says_it_stands(finding: Finding) -> bool:
    """True of the flight recorder's findings on a server that lives: it stands, or one starves."""
    return finding.check == RECORDS and KINDS[RECORDS][finding.kind].entry == _STANDS


def accuses(finding: Finding, completed: bool) -> bool:
    """True unless the flight recorder only tells how SGLang itself ended, or stands.

    completed: the server did all that it was asked for, so that it did not stand.
    """
    return finding.check != RECORDS or (completed and says_it_stands(finding))


def shown(under: int | None = None) -> dict[str, dict[str, Any]]:
    """Title of each scheduler of this process -> what it shows, as ``g4debug doctor`` sees it.

    under: the parent process of the schedulers, if not this one. A status is not older than this
    call. A process that ends meanwhile, or shows no such status, is left out.
    """
    import psutil

    from g4debug.findings import status_file

    asked = time.monotonic()  # of the clock that all processes share
    while True:
        found: dict[str, dict[str, Any]] = {}
        for process in psutil.Process(under).children(recursive=True):
            with contextlib.suppress(psutil.Error, status_file.StatusFileError):
                title = " ".join(process.cmdline())
                status = (
                    status_file.read(process.pid) if title.startswith("sglang::scheduler") else None
                )
                if status is not None:
                    found[title.split()[0]] = status
        new = {title: status for title, status in found.items() if status["told"] > asked}
        if len(new) == len(found) or time.monotonic() > asked + PATIENCE:
            return new
        time.sleep(0.1)


def of_ranks() -> dict[str, list[dict[str, Any]]]:
    """Title of each scheduler -> the status of each of its tracers; {} if none shows any."""
    return {title: list(status["tracers"]) for title, status in shown().items()}


def of_one_rank(under: int | None = None) -> list[dict[str, Any]]:
    """The status of each tracer of the only scheduler; [] if it shows none."""
    return next((list(status["tracers"]) for status in shown(under).values()), [])


def of_schedulers() -> dict[str, dict[str, dict[str, Any]]]:
    """Title of each scheduler -> tracer -> ``off`` (why, or '') and ``count``, its checks."""
    return {
        title: {
            t["name"]: {"off": t["off"], "count": sum(c["count"] for c in t["checked"])}
            for t in status["tracers"]
        }
        for title, status in shown().items()
    }
