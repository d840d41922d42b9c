"""Runs a script on a release that is not installed: from its unpacked wheel, in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wheels

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MISSING = "ModuleNotFoundError"


def driven(name: str, script: str, *arguments: str) -> dict[str, Any]:
    """The ``RESULT`` that a script of this folder prints. The test fails if it does not.

    name: of the release. The packages beside SGLang are those of this environment.
    """
    root = wheels.unpacked(name)
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("G4DEBUG_", "SGLANG_"))}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (root, ROOT, HERE)))
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=600
    )
    told = done.stdout + done.stderr
    missing = [x for x in told.splitlines() if x.startswith(MISSING)]
    if missing:
        pytest.fail(
            f"SGLang {name} was not driven: this environment lacks a package that it imports "
            f"({missing[-1]}). Install it here, or run this with the release's own environment.",
            pytrace=False,
        )
    assert done.returncode == 0, told[-4000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    assert result["release"] == name
    return result
