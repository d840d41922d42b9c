"""Replays a dump of each case's run with the bug: in how many does the same come again?

g4debug keeps a tape in each dump, and where it finds nothing, the run's tape is asked for at its
end. ``g4debug replay`` then gets the dump, and nothing else of the run. It needs the CPU engine, so
runs on a GPU are kept there (``recorded``) and replayed elsewhere.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from harness.replays import NoResult, replay
from harness.tracers import on_one_rank

from g4debug.dumps import reading
from suites.history import cell as cells
from suites.history import grades
from suites.history.case import CPU, CUDA, Case
from suites.history.cases import case_of
from suites.history.cell import BUGGY, NO_ALARM, SPOILED, Cell
from suites.history.plugin import FOLDER, PUT_BACK, TRUTH

TOOLS: Final = ("g4debug", "g4debug-best")  # the second one where the first one refuses
HELD_BACK: Final = ("core",)  # of a case that needs a GPU: other tracers would make SGLang wait
WATCH: Final = ("watch",)  # a server that is left armed: its tape is replayed with every tracer
TAPE: Final = "tape.pt"  # in a cell's folder: its tape, if it ended without a finding
SECONDS: Final = 300  # for the replay, and for shrinking
REPRODUCED: Final = "reproduced"
FOUND: Final = "found"
INNOCENT: Final = "innocent"
SILENT: Final = "nothing found"
DIFFER: Final = "states differ"
CANNOT: Final = "cannot be replayed"
OTHER: Final = "another finding"
NOT_TOLD: Final = "cannot be told"
NOT_RUN: Final = "not run"


@dataclass(frozen=True)
class Replay:
    """The replay of one run. word: one of those above. said: what it said, in a line.

    equal: steps that were equal, of ``steps``. kept: requests that are enough, of ``requests``; 0
    if that was not tried. seconds: of the whole command, with SGLang's start and shrinking. truth:
    the ground truth was there, as in the run. device: where the run was, "cpu" or "cuda".
    """

    case: str
    seed: int
    tool: str
    word: str
    said: str
    equal: int = -1
    steps: int = 0
    requests: int = 0
    kept: int = 0
    seconds: float = 0.0
    truth: bool = True
    device: str = CPU

    @property
    def watched(self) -> bool:
        """The run had no more than ``SGLANG_TRTLLM_MHA_DEBUG=watch``."""
        return self.tool in WATCH

    @property
    def key(self) -> tuple[str, bool, str, int]:
        """What there is one of."""
        return self.case, self.watched, self.device, self.seed


def tools_of(case: str, watch: bool = False) -> tuple[str, ...]:
    """The tools of the runs of a case that are replayed; the first one that a release takes."""
    return WATCH if watch else HELD_BACK if case_of(case).gpu else TOOLS


def run(
    case: str, seed: int, folder: Path, device: str = CPU, watch: bool = False
) -> Replay | None:
    """Replay the run of a case with its bug. None: there was no run, or it proves nothing.

    folder: keeps the runs and the results; a run that is there is not run again. One on a GPU has
    to be there. watch: the run had no more than ``SGLANG_TRTLLM_MHA_DEBUG=watch``.
    """
    tools = tools_of(case, watch)
    kept = folder / f"{Cell(case, BUGGY, tools[-1], seed, device=device).id}.replay"
    if kept.is_file():
        return Replay(**json.loads(kept.read_text()))
    there = recorded if device == CPU else _there
    ran = there(case, seed, folder, device, tools)
    dump = dump_of(folder / ran.id) if ran is not None else None
    if ran is None or dump is None:
        return None
    found = _replay(ran, dump, folder / ran.id)
    kept.write_text(json.dumps(asdict(found)))
    return found


def recorded(
    case: str, seed: int, folder: Path, device: str, tools: Sequence[str] = ()
) -> Cell | None:
    """The run of a case with its bug, under the first of these tools that SGLang's release takes.

    None if it takes none of them. A run that is in ``folder`` is not run again.
    """
    for tool in tools or tools_of(case):
        blank = Cell(case, BUGGY, tool, seed, device=device)
        ran = cells.kept(blank.id, folder)
        if ran is None:
            ran = cells.run(blank, folder, {})
            if ran.ended != SPOILED and ran.said != cells.ABSENT:
                cells.keep(ran, folder)
        if ran.grade != grades.NA:
            return ran
    return None


def _there(case: str, seed: int, folder: Path, device: str, tools: Sequence[str]) -> Cell | None:
    """The run that ``recorded`` left on a machine with a GPU."""
    known = (cells.kept(Cell(case, BUGGY, t, seed, device=device).id, folder) for t in tools)
    proves = (r for r in known if r and r.grade != grades.NA and (r.triggered or r.tool in TOOLS))
    return next(proves, None)


def dump_of(cell: Path) -> Path | None:
    """The dump of the cell's first finding, of its death, or its tape; None if there is none.

    A server that dies before its first step has no tape.
    """
    found = []
    for path in (cell / "dumps").glob("*.pt"):
        record = reading.read(path)
        at = record.finding
        found.append((record.tape is None, at.kind in NO_ALARM, at.location.step, path))
    if found:
        return min(found)[-1]
    tape = cell / TAPE
    return tape if tape.exists() else None


def _replay(ran: Cell, dump: Path, folder: Path) -> Replay:
    """With all that is computed only if it is needed: pages alone are faster, and shrink faster."""
    asked = dump.name == TAPE
    more = () if asked else ("--pages-only", "--shrink", str(folder / "small.pt"))
    # Nobody looked there, so all look here.
    every = () if ran.tool in TOOLS else ("--trace", ",".join(on_one_rank()))
    more = (*more, *every)
    begin = time.monotonic()
    told = _command(ran, dump, folder, more)
    if not asked and not told["text"].startswith(REPRODUCED):
        begin = time.monotonic()
        told = _command(ran, dump, folder, every)
    shrunk = told.get("shrunk") or {}
    word = word_of(told)
    return Replay(
        ran.case,
        ran.seed,
        ran.tool,
        FOUND if every and word == OTHER else word,
        " ".join([told["text"], *told["more"]])[:500],
        told["equal"],
        told["steps"],
        told["requests"],
        len(shrunk.get("kept", ())),
        round(time.monotonic() - begin, 1),
        device=ran.device,
    )


def _command(ran: Cell, dump: Path, folder: Path, more: Sequence[str]) -> dict[str, Any]:
    try:
        return replay(dump, folder, environment(ran, folder), SECONDS, *more)
    except NoResult as e:
        raise RuntimeError(f"g4debug replay of {ran.id}: {e}") from e


def environment(ran: Cell, folder: Path) -> dict[str, str]:
    """SGLang is as it was in the run: with the ground truth, which an exception may have come
    through, and with a bug that the suite puts back."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    given = cells.environment(replace(ran, device=CPU), folder)
    counts = folder / "replayed"
    counts.mkdir(parents=True, exist_ok=True)
    path = [str(folder / "plugin"), str(cells.REPRO), str(cells.ROOT)]
    return {
        **mine,
        "PYTHONPATH": os.pathsep.join(path),
        **{name: given[name] for name in (TRUTH, PUT_BACK) if name in given},
        FOLDER: str(counts),
    }


def word_of(told: Mapping[str, Any]) -> str:
    """What ``g4debug replay --json`` said, in a word."""
    text: str = told["text"]
    for begin, word in (
        (("nothing was found, there or here",), SILENT),
        (("not reproduced, states equal",), INNOCENT),
        (("reproduced", "explained"), REPRODUCED),
        (("states differ",), DIFFER),
        (("cannot be replayed",), CANNOT),
        (("cannot be told",), NOT_TOLD),
        (("found here",), FOUND),
    ):
        if text.startswith(begin):
            return word
    return OTHER


def words(case: Case, replayed: Sequence[Replay], watch: bool = False) -> str:
    """The entry of a case in the table: of its runs on a CPU, and of those on a GPU.

    watch: of the runs that had no more than ``SGLANG_TRTLLM_MHA_DEBUG=watch``.
    """
    found = [r for r in replayed if r.watched == watch]
    parts = [_words(case, [r for r in found if r.device == device]) for device in (CPU, CUDA)]
    parts[1] = f"from a GPU: {parts[1]}" if parts[1] else ""
    return "; ".join(filter(None, parts)) or NOT_RUN


def _words(case: Case, found: Sequence[Replay]) -> str:
    if not found:
        return ""
    tally = [r.word for r in found]
    word = max(dict.fromkeys(tally), key=tally.count)
    false = sum(w == INNOCENT for w in tally) if not case.innocent else 0
    text = f"{word} {tally.count(word)}/{len(found)}"
    text += f"; {false} FALSE" if false else ""
    same = [r for r in found if r.word == word]
    small = [r for r in same if r.kept]
    if small:
        least = min(small, key=lambda r: r.kept)
        text += f", {least.kept} of {least.requests} requests"
    return f"{text}, {statistics.median(r.seconds for r in same):.0f} s"


def good(found: Iterable[Replay]) -> bool:
    """Nobody was called innocent who is not."""
    return not any(r.word == INNOCENT and not case_of(r.case).innocent for r in found)


def as_text(found: Iterable[Replay]) -> str:
    """One in a line, as JSON."""
    ordered = sorted(found, key=lambda r: r.key)
    return "".join(f"{json.dumps(asdict(r))}\n" for r in ordered)


def from_text(text: str) -> list[Replay]:
    return [_renamed(Replay(**json.loads(line))) for line in text.splitlines()]


def _renamed(one: Replay) -> Replay:
    """Of a run without a finding g4debug said "reproduced: N of N steps are equal, and nothing was
    found" until its words were changed. The suite wrote "innocent" then, which g4debug never said.
    """
    silent = one.word == INNOCENT and one.said.startswith("reproduced: ")
    return replace(one, word=SILENT) if silent else one
