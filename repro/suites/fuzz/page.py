"""The pages that ``repro/fuzz.py --out`` writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.pages import fill

from suites.fuzz.corrupt_variant import COMMON, SERVERS
from suites.fuzz.corruption import Corruption
from suites.fuzz.grade import BAD, SOON, TOLD, VERDICTS, Grade

if TYPE_CHECKING:
    from suites.fuzz.narrow import Seen

# What becomes of "told", by how late it was.
TOLD_IN = ("told in the same step", "one step late", "later, as allowed")
COLUMNS = (*TOLD_IN, *VERDICTS[1:])


@dataclass(frozen=True)
class Case:
    """A corruption that was made on a server, and what came of it."""

    server: str
    corruption: Corruption
    grade: Grade

    @property
    def column(self) -> str:
        """The column of the page in which it is counted."""
        if self.grade.verdict != TOLD:
            return self.grade.verdict
        return TOLD_IN[min(self.grade.late, SOON + 1)]


@dataclass(frozen=True)
class Server:
    """A server that was drawn, and its verdict."""

    seed: int
    words: str
    verdict: str
    text: str


def corruptions(out: Path, seeds: range, cases: Sequence[Case], unsound: dict[str, str]) -> None:
    """Write the page of ``--corrupt``. unsound: server -> why nothing can be compared with it."""
    later = [it for it in cases if it.grade.verdict == TOLD and it.grade.late > SOON]
    text = fill(
        Path(__file__).with_name("corruptions.md.j2"),
        seeds=seeds,
        columns=COLUMNS,
        servers=_rows(cases, lambda it: it.server),
        structures=_rows(cases, lambda it: f"{it.corruption.what} ({it.corruption.form})"),
        arguments={name: _arguments(*given) for name, given in SERVERS.items()},
        common=_arguments(False, COMMON),
        later=_later(later),
        bad=[it for it in cases if it.grade.verdict in BAD],
        unsound=unsound,
    )
    out.write_text(text)


def narrow(
    out: Path, seeds: range, found: Sequence[Seen], said: str, hang: int, stands: float
) -> None:
    """Write the page of ``--narrow``. said: the whole run, in sentences."""
    bare = [it for it in found if not it.fixed]
    text = fill(
        Path(__file__).with_name("narrow.md.j2"),
        seeds=seeds,
        said=said,
        hang=hang,
        stands=stands,
        found=found,
        reasons=dict(Counter(_stood_by(it) for it in bare).most_common()),
    )
    out.write_text(text)


def _stood_by(it: Seen) -> str:
    """Why a server stood, or that it did not."""
    if not it.stood:
        return "nobody stood" if it.good else "bad, and nobody stood"
    return f"some stood: {it.reason or 'not told'}"


def servers(out: Path, seeds: range, found: Sequence[Server], model: str = "") -> None:
    """Write the page of the healthy servers that were drawn. model: as it was asked for, if so."""
    text = fill(
        Path(__file__).with_name("servers.md.j2"),
        seeds=seeds,
        model=model,
        found=found,
        counts={
            v: sum(it.verdict == v for it in found) for v in dict.fromkeys(x.verdict for x in found)
        },
    )
    out.write_text(text)


def _rows(cases: Sequence[Case], of: Callable[[Case], str]) -> dict[str, list[int]]:
    """What ``of`` says of a case -> how many there are in each column."""
    found: dict[str, list[int]] = {}
    for it in sorted(cases, key=of):
        found.setdefault(of(it), [0] * len(COLUMNS))[COLUMNS.index(it.column)] += 1
    return found


def _later(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One entry for each structure, moment and reason."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for it in cases:
        key = (it.corruption.what, it.corruption.moment, it.grade.allowed)
        found.setdefault(key, []).append(it.grade.late)
    return [
        {"what": what, "moment": moment, "why": why, "late": sorted(late)}
        for (what, moment, why), late in sorted(found.items())
    ]


def _arguments(mtp: bool, given: Any) -> str:
    return ", ".join([*(["MTP"] if mtp else []), *(f"{k}={v}" for k, v in given.items())])
