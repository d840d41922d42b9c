"""A second SGLang plugin: a step that cannot be recorded, at ``FAILS_AT``.

It stands for a batch that the step recorder does not know. Installed by ``installed(folder)``, with
an entry point of its own, like anybody's plugin.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def installed(folder: Path) -> str:
    """Make the plugin installable from ``folder``; the PYTHONPATH that a server needs for it."""
    info = folder / "failing_record-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing-record\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\na_failing_record = failing_record:register\n"
    )
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(folder), str(Path(__file__).parent), inherited]).rstrip(os.pathsep)


def register() -> None:
    """The entry point."""
    from g4debug.findings.steps import Recorder

    record = Recorder.record

    def fails(self: Recorder, batch: Any) -> None:
        if self.step == int(os.environ["FAILS_AT"]):
            raise AttributeError("this batch has no seq_lens_cpu")
        record(self, batch)

    Recorder.record = fails  # type: ignore[method-assign]
