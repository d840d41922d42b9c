"""A second SGLang plugin: a step that cannot be recorded, at ``FAILS_AT``.

It stands for a batch that the step recorder does not know. Installed by ``installed(folder)``, with
an entry point of its own, like anybody's plugin.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import installed_plugin


def installed(folder: Path) -> str:
    """Make the plugin installable from ``folder``; the PYTHONPATH that a server needs for it."""
    installed_plugin.install(folder, "failing_record", "failing_record:register")
    return installed_plugin.path(folder, Path(__file__).parent)


def register() -> None:
    """The entry point."""
    from g4debug.findings.steps import Recorder

    record = Recorder.record

    def fails(self: Recorder, batch: Any) -> None:
        if self.step == int(os.environ["FAILS_AT"]):
            raise AttributeError("this batch has no seq_lens_cpu")
        record(self, batch)

    Recorder.record = fails  # type: ignore[method-assign]
