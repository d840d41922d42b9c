"""What the schedulers of this process show of themselves, as ``g4debug doctor`` sees it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

SETTLE = 1.5  # seconds; a scheduler shows its status once in a second


def shown() -> dict[str, dict[str, Any]]:
    """Title of each scheduler -> what it shows (:func:`g4debug.findings.board.read`).

    A process that ends meanwhile, or shows nothing, is left out.
    """
    import psutil

    from g4debug.findings import board

    time.sleep(SETTLE)
    found: dict[str, dict[str, Any]] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, board.BoardError):
            title = " ".join(process.cmdline())
            status = board.read(process.pid) if title.startswith("sglang::scheduler") else None
            if status is not None:
                found[title.split()[0]] = status
    return found


def of_schedulers() -> dict[str, dict[str, dict[str, Any]]]:
    """Title of each scheduler -> tracer -> ``off`` (why, or '') and ``count``, its checks."""
    return {
        title: {
            t["name"]: {"off": t["off"], "count": sum(c["count"] for c in t["checked"])}
            for t in status["tracers"]
        }
        for title, status in shown().items()
    }
