"""Which release has which bug: each case's workload and ground truth on every release there is.

A case names one release with its bug and one without. Whoever has another one wants to know about
that. So the settings of the arm with the bug run on each release as it is, without a tool. Bugs
that are put back are left out, because no release has them by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.version import Version

from suites.history.case import PUT_BACK, Case
from suites.history.cell import NOT_EXERCISED, TRUTH_FAILED, Cell
from suites.history.tools import NOTHING

PINS = Path(__file__).parents[3] / "requirements"
SEEDS = 2  # at most: a run that hangs takes minutes, and each release has them
HAS: Final = "has it"
NO: Final = "no"
NOT_MET: Final = "not met"
DIES: Final = "dies first"
HANGS: Final = "hangs"
OTHER_CODE: Final = "other code"
ORDER: Final = (HAS, HANGS, DIES, OTHER_CODE, NO, NOT_MET)  # the first that a run says counts
NOT_RUN: Final = "not run"


@dataclass(frozen=True)
class Answer:
    """word: one of those above. told, runs: in how many runs it is so.

    why: of each run that ended by something else, in a line.
    """

    word: str
    told: int = 0
    runs: int = 0
    why: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.word + f" ({self.told} of {self.runs})" * (self.told < self.runs)


def releases() -> list[str]:
    """Those that an environment can be made for, oldest first."""
    found = (path.stem.removeprefix("sglang-") for path in PINS.glob("sglang-*.txt"))
    return sorted(found, key=Version)


def asked(known: Mapping[str, Case]) -> dict[str, Case]:
    """The cases that can be asked on a CPU."""
    return {n: c for n, c in known.items() if c.origin != PUT_BACK and not c.gpu}


def answer(cells: Sequence[Cell]) -> Answer:
    """The answer of one case's runs on one release. cells: a run each, with its own seed."""
    if not cells:
        return Answer(NOT_RUN)
    words = [_word(c) for c in cells]
    word = next(w for w in ORDER if w in words)
    why = {
        f"{w}: `{TRUTH_FAILED.sub('', c.said)}`": None  # a set that keeps the order
        for c, w in zip(cells, words, strict=True)
        if w in (DIES, OTHER_CODE)
    }
    return Answer(word, words.count(word), len(cells), tuple(why))


def _word(cell: Cell) -> str:
    if cell.triggered:
        return HAS
    if TRUTH_FAILED.match(cell.said):
        return OTHER_CODE
    if cell.ended == "hangs":
        return HANGS
    if cell.ended != "completed" and NOT_EXERCISED not in cell.said:
        return DIES
    return NO if cell.reached and cell.ended == "completed" else NOT_MET


def answers(known: Mapping[str, Case], cells: Iterable[Cell]) -> dict[str, dict[str, Answer]]:
    """case -> release -> the answer of its runs; empty if there were no runs."""
    bare = [c for c in cells if c.tool == NOTHING]
    found = {
        name: {
            release: answer([c for c in bare if c.case == name and c.arm == release])
            for release in releases()
        }
        for name in asked(known)
    }
    return found if any(a.runs for row in found.values() for a in row.values()) else {}


def reasons(found: Mapping[str, Mapping[str, Answer]]) -> dict[str, list[str]]:
    """Another reason why runs ended, in a line -> the cases and releases in which it did."""
    said: dict[str, list[str]] = {}
    for name, row in found.items():
        for release, one in row.items():
            for why in one.why:
                said.setdefault(why, []).append(f"{name} on {release}")
    return said
