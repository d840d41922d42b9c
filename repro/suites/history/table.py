"""Turns cells into rows: the results of each tool on each case, in numbers."""

from __future__ import annotations

import statistics
from collections import Counter as Tally
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from harness.render import Block
from packaging.version import Version

from g4debug.cpu.server import DEFAULT
from suites.history import across, grades, replays
from suites.history.case import CPU, CUDA, Case
from suites.history.cell import BUGGY, FIXED, Cell
from suites.history.replays import Replay
from suites.history.tools import NOTHING, TOOLS, device_of


@dataclass
class Entry:
    """The results of one tool on one case, over the seeds.

    grade: the commonest. alarms: seeds in which it told, of the ``seeds`` that triggered the bug,
    or would have done so, had the tool not stopped it. late: how many it told too late. after:
    median of the steps from the trigger to the alarm, -1 if no alarm came after one. said: of one
    of them. void: seeds in which the bug was not triggered. false: alarms on the healthy arm.
    healthy: runs there that came to where the bug would be.
    valid: the ground truth holds on the device that the tool ran on.
    """

    grade: str = grades.NA
    alarms: int = 0
    seeds: int = 0
    after: float = -1
    said: str = ""
    void: int = 0
    late: int = 0
    prevented: int = 0
    foreign: int = 0
    false: int = 0
    healthy: int = 0
    valid: bool = True

    @property
    def words(self) -> str:
        if self.grade == grades.NA:
            return grades.NA
        foreign = f"; {self.foreign} foreign" if self.foreign else ""
        false = f"; {self.false} FALSE" if self.false else ""
        return (
            self._told + foreign + false + ("" if self.valid or not self.seeds else " (not valid)")
        )

    @property
    def _told(self) -> str:
        if not self.seeds:
            if self.prevented:
                return f"{PREVENTED}, {self.prevented}/{self.void}"
            return "void" if self.void else NOT_RUN
        if self.grade in grades.TOLD:
            late = f" ({self.late} late)" if self.late and self.grade != grades.LATE else ""
            return f"{self.grade} {self.alarms}/{self.seeds}{late}, {_steps(self.after)}"
        return self.grade + f" (told {self.alarms}/{self.seeds})" * bool(self.alarms)

    @property
    def without(self) -> str:
        """How often the tool stayed silent, or raised a false alarm, where the bug is not."""
        if self.grade == grades.NA or not self.healthy:
            return "–"
        if self.false:
            return f"{self.false}/{self.healthy} FALSE"
        return f"silent {self.healthy}/{self.healthy}"


NOT_RUN = "not run"
PREVENTED = "does not happen with it"


class Met(NamedTuple):
    """runs: how many there were. reached, triggered: in how many of them the bug was."""

    runs: int = 0
    reached: int = 0
    triggered: int = 0


@dataclass
class Truth:
    """The ground truth of a case on one device, from the runs without a tool.

    buggy, sound: the arms with the bug and without it. note: what the first trigger was. seen: what
    a user sees. problem: why it proves nothing, '' if it does. where: the name of the GPU.
    """

    buggy: Met = field(default_factory=Met)
    sound: Met = field(default_factory=Met)
    seen: str = ""
    note: str = ""
    problem: str = ""
    where: str = ""


@dataclass
class Row:
    """A case and the tools' answers to it.

    truth: of the device that the case is for. gpu: of the tools that need a GPU, where the case
    runs on a CPU. replays: of runs with the bug.
    """

    name: str
    case: Case
    entries: dict[str, Entry] = field(default_factory=dict)
    truth: Truth = field(default_factory=Truth)
    gpu: Truth = field(default_factory=Truth)
    replays: list[Replay] = field(default_factory=list)

    @property
    def replayed(self) -> str:
        return replays.words(self.case, self.replays)

    @property
    def after_watch(self) -> str:
        return replays.words(self.case, self.replays, watch=True)

    @property
    def ran(self) -> bool:
        return self.truth.buggy.runs > 0

    @property
    def problem(self) -> str:
        return self.truth.problem

    def of(self, tool: str) -> Truth:
        """The ground truth of the runs that a tool's entry is about."""
        there = device_of(self.case, tool) != device_of(self.case, NOTHING)
        return self.gpu if there else self.truth

    @property
    def good(self) -> bool:
        accused = any(e.false for t, e in self.entries.items() if TOOLS[t].ours)
        return not self.problem and not accused and replays.good(self.replays)


def by_model(
    known: Mapping[str, Case], cells: Collection[Cell], replayed: Iterable[Replay] = ()
) -> dict[str, list[Row]]:
    """Model -> its rows. The replays are of Gemma-4's runs."""
    found = {DEFAULT: rows(known, [c for c in cells if c.model == DEFAULT], replayed)}
    for model in sorted({c.model for c in cells} - {DEFAULT}):
        found[model] = rows(known, [c for c in cells if c.model == model])
    return found


def rows(
    known: Mapping[str, Case], cells: Iterable[Cell], replayed: Iterable[Replay] = ()
) -> list[Row]:
    every, again = list(cells), list(replayed)
    found = [_row(name, case, [c for c in every if c.case == name]) for name, case in known.items()]
    for row in found:
        row.replays = [r for r in again if r.case == row.name]
    return found


def _row(name: str, case: Case, cells: Sequence[Cell]) -> Row:
    on = {d: [c for c in cells if c.device == d] for d in (CPU, CUDA)}
    row = Row(name, case, truth=_truth(case, on[device_of(case, NOTHING)]))
    if not case.gpu:
        row.gpu = _truth(case, on[CUDA])
    for tool in TOOLS:
        mine = on[device_of(case, tool)]
        bare = [c for c in mine if c.tool == NOTHING and c.arm == BUGGY]
        met = {c.seed for c in bare if c.triggered}
        row.entries[tool] = _entry([c for c in mine if c.tool == tool], met)
        row.entries[tool].valid = not row.of(tool).problem
    return row


def _truth(case: Case, cells: Sequence[Cell]) -> Truth:
    ran = [c for c in cells if c.tool == NOTHING and c.grade != grades.NA]
    bare = [c for c in ran if c.arm == BUGGY]
    sound = [c for c in ran if c.arm == FIXED]
    if not bare:
        return Truth()
    truth = Truth(
        _met(bare),
        _met(sound),
        seen(bare, rounding(case, cells), case.fixed.release),
        next((c.note for c in bare if c.note), ""),
        where=bare[0].where,
    )
    if not truth.buggy.triggered:
        truth.problem = "the bug was not triggered, so nothing was missed either"
    elif not sound:
        truth.problem = "SGLang without the bug was not run there"
    elif truth.sound.triggered:
        truth.problem = "SGLang without the bug triggered it, too"
    elif truth.sound.reached < truth.sound.runs:
        truth.problem = "SGLang without the bug was not in the situation in every run"
    return truth


def _met(cells: Sequence[Cell]) -> Met:
    return Met(len(cells), sum(c.reached > 0 for c in cells), sum(c.triggered > 0 for c in cells))


def _entry(cells: Sequence[Cell], met: set[int]) -> Entry:
    """met: the seeds that trigger the bug if no tool stops them before it."""
    buggy = [c for c in cells if c.arm == BUGGY]
    # Whoever refused, or never came to where the bug is, had nothing to accuse.
    healthy = [c for c in cells if c.arm == FIXED and c.grade != grades.NA]
    healthy = [c for c in healthy if c.reached or c.grade in grades.TOLD]
    if not buggy:
        return Entry(NOT_RUN)
    if all(c.grade == grades.NA for c in buggy):
        return Entry(grades.NA, said=buggy[0].said)
    # A tool may stop SGLang just before the bug is counted. Where it accuses nobody without the bug
    # that is about the bug, if this seed triggers it without a tool.
    sound = bool(healthy) and not any(c.grade in grades.TOLD for c in healthy)
    before = met if sound else set()
    real = [c for c in buggy if c.triggered or (c.grade in grades.TOLD and c.seed in before)]
    told = [c for c in real if c.grade in grades.TOLD]
    entry = Entry(grades.SILENT, len(told), len(real), void=len(buggy) - len(real))
    entry.prevented = sum(
        c.seed in met and c.ended == "completed" and c.grade not in grades.TOLD
        for c in buggy
        if c not in real
    )
    if real:
        tally = Tally(c.grade for c in real)
        entry.grade = max(tally, key=lambda g: (tally[g], grades.ORDER.index(g)))
    if told:
        entry.late = sum(c.grade == grades.LATE for c in told)
        entry.after = statistics.median([c.after for c in told if c.after >= 0] or [-1])
        entry.said = told[0].said
    elif real:
        entry.said = real[0].said
    entry.foreign = sum(c.grade in grades.TOLD for c in buggy if c not in real)
    entry.false = sum(c.grade in grades.TOLD for c in healthy)
    entry.healthy = len(healthy)
    return entry


def rounding(case: Case, cells: Sequence[Cell]) -> int:
    """How many answers of a run without the bug differ from the right ones, at most, with any tool.

    On a GPU, in bfloat16, an answer depends on which requests share its batch. The CPU engine
    computes in float32, where two runs of one release give the same answers. Where the right ones
    are of another release than the arm without the bug, that arm says nothing of rounding there.
    """
    sound = [c for c in cells if c.arm == FIXED and (c.device != CPU or case.right is None)]
    return max(0, max((c.wrong for c in sound), default=0))


def seen(bare: Sequence[Cell], without: int = 0, sound: str = "") -> str:
    """The symptom that a user sees without any tool, in a few words.

    without: so many answers differ without the bug, too, in the release ``sound``.
    """
    real = [c for c in bare if c.triggered] or list(bare)
    ended = Tally(c.ended for c in real).most_common(1)[0][0]
    if ended == "died":
        return next((c.said for c in real if c.said), "it dies")
    if ended == "hangs":
        return "it hangs"
    known = [c for c in real if c.wrong >= 0]
    if not known:
        return "it completes; there were no right answers to compare with"
    worst = max(known, key=lambda c: c.wrong)
    wrong = sum(c.wrong > without for c in known)
    if wrong:
        told = f"up to {worst.wrong} of {worst.answers}, in {wrong} of {len(known)} runs"
        too = f"; without the bug, on {sound}, up to {without} differ" * (without > 0)
        return f"wrong answers ({told}{too})"
    if worst.wrong > 0:
        differ = f"{worst.wrong} of {worst.answers} answers differ"
        without_it = f"without the bug, on {sound}, up to {without} do"
        return f"nothing certain: up to {differ}, and {without_it}"
    return "nothing: it completes, and all answers are right"


def _steps(after: float) -> str:
    if after < 0:
        return "before it"
    if after == 0:
        return "in its step"
    return f"{after:g} step{'s' * (after != 1)} later"


def releases(known: Mapping[str, Case]) -> list[str]:
    """Those that the cases need, and those that are asked whether they have the bugs."""
    found = set(across.releases()) | {
        arm.release
        for case in known.values()
        if not case.gpu
        for arm in (case.buggy, case.fixed, case.right or case.fixed)
    }
    return sorted(found, key=Version)


def columns(found: Sequence[Row]) -> list[str]:
    """The tools of the table: those that need a GPU are in it if they ran on one."""
    return [
        tool
        for tool in TOOLS
        if tool != NOTHING
        and (not TOOLS[tool].gpu or any(r.entries[tool].words != NOT_RUN for r in found))
    ]


def blocks(found: Sequence[Row]) -> list[Block]:
    """The lines on each row that ran, for a terminal."""
    return [
        Block(
            f"{row.case.number} {row.name}",
            row.good,
            (f"{row.problem.capitalize()}. " if row.problem else "")
            + f"Without a tool: {row.truth.seen}. "
            + " ".join(
                f"{tool}: {entry.words}."
                for tool, entry in row.entries.items()
                if tool != NOTHING and entry.grade not in (grades.NA, NOT_RUN)
            ),
            title=row.case.title,
        )
        for row in found
        if row.ran
    ]


def as_json(found: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """row -> tool -> the tool's entry, for rows and tools that ran."""
    return {
        row.name: {
            tool: {"words": entry.words, **asdict(entry)}
            for tool, entry in row.entries.items()
            if entry.grade != NOT_RUN
        }
        for row in found
        if row.ran
    }


def rates(found: Sequence[Row], tool: str) -> str:
    """``told of triggered``: cases in which the tool told in most of the seeds."""
    entries = [r.entries[tool] for r in found if r.ran and not r.of(tool).problem]
    return _rate((e.alarms, e.seeds) for e in entries)


def first_rates(found: Sequence[Row], tool: str, first: Mapping[str, Any]) -> str:
    """The same, of the first runs. first: case -> tool -> its entry of then."""
    entries = [first.get(r.name, {}).get(tool, {}) for r in found if not r.of(tool).problem]
    return _rate((e["alarms"], e["seeds"]) for e in entries if e)


def _rate(runs: Iterable[tuple[int, int]]) -> str:
    """runs: of each case, in how many the tool told, and in how many the bug was triggered."""
    real = [(told, of) for told, of in runs if of]
    return f"{sum(told * 2 > of for told, of in real)} of {len(real)}" if real else "–"
