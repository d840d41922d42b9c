"""Decides from samples of a scheduler's stack whether time is g4debug's: text in, counts out.

py-spy writes one line for each stack that it saw: the frames, outermost first, separated by ``;``,
and how often it was seen. A frame is ``function (file:line)``, with the whole path of the file.

A sample belongs to g4debug if the innermost frame outside of all libraries is one of g4debug's.
Calls from g4debug into torch, Triton or numpy are g4debug's time. SGLang's work inside a hook of
g4debug's is SGLang's time, and so is the work that a fix does in place of SGLang.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_FRAME = re.compile(r"^(?P<function>.*) \((?P<file>.*):(?P<line>\d+)\)$")
LOOP = "event_loop"  # in the name of the function that every sample of a step is inside
G4DEBUG = str(Path(__file__).resolve().parents[2] / "g4debug") + "/"
# The files that lead from a site to a hook. A sample is listed under the hook, if it came that far.
PLUMBING = ("hooking/hooks.py", "tracers/base.py", "ledger/pool_registry.py")
NOT_OURS = ("cpu/", "fixes/")  # folders of g4debug: what stands in for SGLang or a CUDA kernel


@dataclass
class Share:
    """samples: of the event loop. ours: of these, g4debug's. by: ours, by where g4debug begins."""

    samples: int = 0
    ours: int = 0
    by: Counter[str] = field(default_factory=Counter)

    @property
    def of_all(self) -> float:
        """From 0 to 1. ValueError if nothing of the event loop was seen."""
        if not self.samples:
            raise ValueError("no sample of the scheduler's event loop")
        return self.ours / self.samples


def share(lines: Iterable[str], sglang: str, g4debug: str = G4DEBUG) -> Share:
    """sglang, g4debug: the folders of the two packages, each with a slash at its end."""
    found = Share()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if not count.strip().isdigit():
            continue
        frames = [m for m in map(_FRAME.match, stack.split(";")) if m is not None]
        if not any(LOOP in m["function"] for m in frames):
            continue
        many = int(count)
        found.samples += many
        own = _own(frames, sglang, g4debug)
        if own:
            found.ours += many
            found.by[own] += many
    return found


def _own(frames: list[re.Match[str]], sglang: str, g4debug: str) -> str:
    """Where g4debug begins in this sample, if it ends in g4debug; '' if it does not."""
    begin = ""
    for frame in reversed(frames):
        file = frame["file"]
        inside = file.removeprefix(g4debug) if file.startswith(g4debug) else ""
        if inside and not inside.startswith(NOT_OURS):
            if not begin or not inside.startswith(PLUMBING):
                begin = f"{inside} {frame['function']}"
        elif inside or file.startswith(sglang):
            break
    return begin
