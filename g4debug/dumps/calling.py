"""How the command g4debug is called on this machine, for the commands that we print."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from g4debug.dumps.heads import quoted

PROGRAM = "g4debug"


def program() -> str:
    """``g4debug`` if a shell finds that, or else what does the same here, quoted for a shell.

    That is the path by which this process was started; or, in a server, the script that was
    installed beside its Python; or ``python -m``.
    """
    if shutil.which(PROGRAM):
        return PROGRAM
    started = Path(sys.argv[0])
    if started.name == PROGRAM and _runs(started):
        return quoted(sys.argv[0])
    beside = Path(sys.executable).with_name(PROGRAM)
    return quoted(beside) if _runs(beside) else f"{quoted(sys.executable)} -m {PROGRAM}"


def _runs(path: Path) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)  # False where nobody may look
