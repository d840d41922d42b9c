"""Real SGLang on the CPU engine, and the status of its tracers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.processes import UP

from suites.healthy import counts

Status = Callable[[], list[dict[str, Any]]]


@contextmanager
def running(result: Path, mtp: bool, arguments: Mapping[str, Any]) -> Iterator[tuple[Any, Status]]:
    """An engine with ``arguments``, and a function that gives its tracers' status now ([] without
    tracers).

    result: the file of the result. The scheduler publishes its status in a file beside it.
    """
    published = result.with_suffix(".counts")
    published.unlink(missing_ok=True)
    armed = "G4DEBUG_TRACE" in os.environ
    if armed:
        os.environ[counts.VARIABLE] = str(published)
    from sglang.srt.entrypoints.engine import Engine as SGLangEngine

    from g4debug.cpu.server import engine_arguments

    class Engine(SGLangEngine):  # type: ignore[misc]  # SGLang has no types
        run_scheduler_process_func = staticmethod(counts.run_scheduler_process)

    engine = Engine(**engine_arguments(mtp=mtp, **{"log_level": "info", **arguments}))
    print(UP, flush=True)
    try:
        yield engine, lambda: counts.latest(published) if armed else []
    finally:
        engine.shutdown()
