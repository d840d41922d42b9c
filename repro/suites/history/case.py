"""The declaration of a case of the history suite: a real bug of SGLang, and how to meet it.

A case is a file ``cases/NAME.py`` with a function NAME, its workload, below ``@case``. The counter
that says whether its bug was really met is in ``truth/NAME.py``, and imports nothing of g4debug.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from g4debug.cpu.server import DEFAULT
from g4debug.cpu.toy import Toy
from suites.healthy.workload import Client
from suites.history import grades

Drive = Callable[[Client], Awaitable[None]]

CPU, CUDA = "cpu", "cuda"  # the device of a cell

NATURAL = "natural"
HELD = "natural, held back"  # a bug of timing, and the timing is forced
FLAGS = "natural with flags"
PUT_BACK = "put back"


@dataclass(frozen=True)
class Arm:
    """One side of a case.

    release: of SGLang. fixes: ids of our fixes that are on; all others are off. faults: the value
    of ``G4DEBUG_FAULTS`` that puts the bug back. engine, environ: in addition to the case's.
    """

    release: str
    fixes: tuple[str, ...] = ()
    faults: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    number: its place in the table. title: the bug, in a few words. threads: where upstream talks of
    it. origin: NATURAL, HELD, FLAGS or PUT_BACK. buggy, fixed: the two sides. right: the engine
    that gives the right answers, if it is not the fixed side's. cause: (file below ``sglang/srt/``,
    function) that the fix changes, upstream's or ours; a tool that names one of them names the
    cause. drive: the workload, ``drive(client)``, from the text of the thread. engine,
    environ: arguments of ``sgl.Engine``, and switches. mtp: with FROZEN_KV_MTP. expected: tool ->
    the grade that was predicted before the first run. why: what the case is in the suite for, one
    sentence. chosen_after: the case was chosen when g4debug's tracers
    existed. gpu: why no CPU can run it. innocent: the bug is in nothing that the host decides, so a
    replay of its run is right to find nothing. seconds: after which a run counts as one that hangs,
    from the moment on at which its engine is up. stands: the bug is a server that stands, and its
    truth knows that nobody computes: a run that has begun no batch for so many seconds since the
    bug was counted has proved what it can, and is not waited for. 0: it is not such a case.
    """

    number: int
    title: str
    threads: tuple[str, ...]
    origin: str
    buggy: Arm
    fixed: Arm
    cause: tuple[tuple[str, str], ...]
    drive: Drive
    why: str
    expected: Mapping[str, str]
    right: Arm | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    mtp: bool = True
    chosen_after: bool = False
    gpu: str = ""
    innocent: bool = False
    seconds: float = 240.0
    stands: float = 0.0

    def without(self, toy: Toy) -> str:
        """Why it cannot be met on a server of another model than Gemma-4; '' if it can."""
        if toy.id == DEFAULT:
            return ""
        if self.gpu:
            return f"no CPU can run it: {self.gpu}"
        if self.mtp and not toy.draft:
            return f"its server drafts, and {toy.id} has no draft here"
        return "" if toy.pool == "swa" else f"it is a bug of a SWA pool, and {toy.id} has none here"


def case(**declared: Any) -> Callable[[Drive], Case]:
    """A decorator that makes a Case of the function that drives it. declared: its fields."""
    return lambda drive: Case(drive=drive, **declared)


def predicted(**told: str) -> dict[str, str]:
    """tool -> the grade that it is expected to get. told: grade -> tools, separated by spaces."""
    return {t: grades.SHORT[grade] for grade, tools in told.items() for t in tools.split()}
