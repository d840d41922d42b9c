"""A second SGLang plugin: the tape has room for some kilobytes only, so its beginning is dropped.

G4DEBUG_TAPE counts mebibytes, which a test would take half an hour to fill. Installed by
``installed(folder)``, with an entry point of its own, like anybody's plugin.
"""

from __future__ import annotations

import os
from pathlib import Path

import installed_plugin

BYTES = "SMALL_TAPE_BYTES"


def installed(folder: Path, size: int) -> dict[str, str]:
    """Make the plugin installable from ``folder``; the variables that a server needs for it."""
    installed_plugin.install(folder, "small_tape", "small_tape:register")
    here = Path(__file__).parent
    return {"PYTHONPATH": installed_plugin.path(folder, here), BYTES: str(size)}


def register() -> None:
    from g4debug.findings.tape import Ring

    whole = Ring.__init__

    def small(self: Ring, limit: int, settled: int = 64) -> None:
        whole(self, int(os.environ[BYTES]), settled)

    Ring.__init__ = small  # type: ignore[method-assign]
