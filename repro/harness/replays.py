"""The tape of a server: kept before the server ends, and replayed afterwards."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.processes import go_on, group, without_switches

NAME = "tape.pt"
SECONDS = 900  # of one replay


def keep_tape(folder: Path) -> None:
    """Write the tape of this process's scheduler. Its tracers must be armed."""
    from g4debug.cli._tape import fetch

    fetch(os.getpid(), folder / NAME)


class NoResult(Exception):
    """A replay ended without a result; the text has the end of what it printed."""


def replay(
    dump: Path,
    folder: Path,
    environ: Mapping[str, str],
    seconds: int,
    *more: str,
    limit: float = math.inf,
) -> dict[str, Any]:
    """The result of ``g4debug replay DUMP --json``. Raises NoResult.

    folder: gets the log, and what the replay keeps. seconds: for the replay itself. more: options.
    limit: seconds until the whole command is ended.
    """
    log = folder / "replay.log"
    command = [sys.executable, "-m", "g4debug", "replay", str(dump), "--json"]
    command += ["--seconds", str(seconds), "--keep", str(folder / "replay"), *more]
    end, status = time.monotonic() + limit, None
    with log.open("wb") as sink, group(command, environ, sink) as process:
        while status is None and time.monotonic() < end:
            go_on()
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=0.5)
    text = log.read_text(errors="replace")
    try:
        found: dict[str, Any] = json.loads(text[text.index("{") :])
    except ValueError:
        said = f"the replay ended with status {status}: {text.strip()[-200:]}"
        raise NoResult(said) from None
    return found


def replayed(folder: Path) -> tuple[bool, str]:
    """Replay the tape in ``folder``: whether it passes, and the result in words.

    It passes if all steps are equal and nothing is found, or if the tape says what it cannot carry.
    So it does if it could not carry something until it began anew in an idle server: which pages
    the prefix cache had by then is not known. And so it does if no server like this one was ever
    replayed, of which ``g4debug replay`` says so.
    """
    from g4debug.dumps import reading
    from g4debug.replay import setting

    record = reading.read(folder / NAME)
    tape = record.tape
    if tape is None:
        return False, "the server had no tape"
    limits = tape.limits or (tape.ended if tape.begins == "idle" else ())
    if limits:
        return True, f"no: {'; '.join(limits)}"
    try:
        setting.setting_of(record, *setting.recording_of(record))
    except setting.NeverReplayed as e:
        return True, f"no: {e}"
    except setting.CannotReplay as e:
        return False, f"cannot be replayed, because {e}"
    try:
        told = replay(
            folder / NAME, folder, without_switches(), SECONDS, "--pages-only", limit=2 * SECONDS
        )
    except NoResult as e:
        return False, str(e)
    if told["code"]:
        return False, " ".join((told["text"], *told["more"]))
    return True, f"{told['equal']} of {told['steps']} steps equal"
