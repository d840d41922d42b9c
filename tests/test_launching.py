"""The launcher of small kernels: it launches the same as Triton itself would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_later_launches_are_those_that_triton_makes_itself():
    """In a process of its own, without Triton's interpreter and with a driver that launches
    nothing: it keeps what it is given.
    """
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, HERE / "support" / "recorded_launches.py"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the launches are the same"
