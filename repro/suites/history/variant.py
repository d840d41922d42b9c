"""A child: one cell of the history suite, which is a case's workload on one engine.

The result has the answers so far after each of them, because the engine may die with the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.engine import running

from suites.healthy.workload import Client
from suites.history import gpu
from suites.history.case import CPU
from suites.history.cases import case_of
from suites.history.cell import arm_of
from suites.history.replays import TAPE

IDLE_SECONDS = 1.0  # at the end: when nothing runs, SGLang counts and compares


def main(
    device: str, result: Path, name: str, arm: str, seed: int, more: Mapping[str, Any]
) -> None:
    """more: arguments of the engine that the tool asks for, and ``model``, a toy's name."""
    case = case_of(name)
    side = arm_of(case, arm)
    log = {"log_level": "info", "decode_log_interval": 1}
    more = {**log, **case.engine, **side.engine, **more}
    if device == CPU:
        from g4debug.cpu.server import engine_arguments

        arguments, patience = engine_arguments(mtp=case.mtp, **more), 1.0
    else:
        arguments, patience = gpu.engine_arguments(case, side, **more), gpu.PATIENCE
    with running(arguments) as engine:
        client = Client(engine, f"{name}-{seed}", result.with_suffix(".log"), patience)
        client.outputs = kept = Kept(result)
        engine.loop.run_until_complete(case.drive(client))
        time.sleep(IDLE_SECONDS)
        if os.environ.get("SGLANG_TRTLLM_MHA_DEBUG"):
            _keep_tape(result.with_name(TAPE))
        kept.write(completed=True)


def _keep_tape(target: Path) -> None:
    """Nothing was found, so there is no dump. What the scheduler decided is asked for."""
    from g4debug.cli import CliError, _tape

    with contextlib.suppress(CliError):  # it has none, where it is of no use
        _tape.fetch(os.getpid(), target)


class Kept(dict[str, Any]):
    """The answers, which are in a file as soon as they are there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.write()

    def write(self, completed: bool = False) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"outputs": self, "completed": completed}))
        part.replace(self._path)
