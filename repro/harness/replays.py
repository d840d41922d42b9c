"""The tape of a healthy server: kept before the server ends, and replayed afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from harness.processes import go_on, group, without_switches

NAME = "tape.pt"
SECONDS = 900  # of one replay


def keep_tape(folder: Path) -> None:
    """Write the tape of this process's scheduler. Its tracers must be armed."""
    from g4debug.cli._tape import fetch

    fetch(os.getpid(), folder / NAME)


def replayed(folder: Path) -> tuple[bool, str]:
    """Replay the tape in ``folder``: whether it passes, and the result in words.

    It passes if all steps are equal and nothing is found, or if the tape says what it cannot carry.
    """
    from g4debug.dumps import reading

    tape = reading.read(folder / NAME).tape
    if tape is None:
        return False, "the server had no tape"
    if tape.limits:
        return True, f"no: {'; '.join(tape.limits)}"
    log = folder / "replay.log"
    command = [sys.executable, "-m", "g4debug", "replay", str(folder / NAME)]
    command += ["--pages-only", "--json", "--seconds", str(SECONDS)]
    command += ["--keep", str(folder / "replay")]
    end, status = time.monotonic() + 2 * SECONDS, None
    with log.open("wb") as sink, group(command, without_switches(), sink) as process:
        while status is None and time.monotonic() < end:
            go_on()
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=0.5)
    text = log.read_text(errors="replace")
    try:
        told = json.loads(text[text.index("{") :])
    except ValueError:
        return False, f"the replay ended with status {status}: {text.strip()[-200:]}"
    if told["code"]:
        return False, " ".join((told["text"], *told["more"]))
    return True, f"{told['equal']} of {told['steps']} steps equal"
