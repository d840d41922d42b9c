"""Grades a corruption: whether g4debug told it, how soon, and whether it was harmless."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.tracers import RECORDS

from suites.fuzz.corruption import Corruption
from suites.fuzz.places import AHEAD, MIDDLE, UNFINISHED

TOLD, LATE, HARMLESS, LISTED, MISSED = "told", "late", "harmless", "listed", "missed"
DISARMED, FALSE, NOTHING, BROKEN = "disarmed", "false", "nothing", "broken"
VERDICTS = (TOLD, LATE, HARMLESS, LISTED, MISSED, DISARMED, FALSE, NOTHING, BROKEN)
BAD = (LATE, MISSED, DISARMED, FALSE, BROKEN)
TRACERS = Path(__file__).resolve().parents[3] / "docs" / "tracers.md"
# The place that was struck, as the strike notes it -> words of the sentence of docs/tracers.md that
# says that a change there cannot be seen. If the page does not say it, it is missed.
CANNOT_SEE: Mapping[str, str] = {
    UNFINISHED: "changes to the last, unfinished page of a request are not seen",
}
SOON = 1  # steps in which a corruption must be told: its own, and with overlap the next


LIFE = 60  # steps: no request of this traffic lives longer
_PAGES = "attention reads the first slot of a page only, and the prefix cache gets the others later"
_WRITTEN = "nothing reads it before the token is written"
# What may be told later than SOON, as long as the request lives, because nothing reads it before:
# (what, where as the strike notes it, '' for anywhere) -> the reason.
SLOW: Mapping[tuple[str, str], str] = {
    ("row", MIDDLE): _PAGES,
    ("row", AHEAD): _WRITTEN,
    ("mapping", MIDDLE): _PAGES,
    ("mapping", AHEAD): _WRITTEN,
    ("alloc", ""): _WRITTEN,  # a draft's slots are allocated ahead
    ("free_list", ""): "nothing reads it before the page is handed out",
    ("node", ""): "nothing reads it before the prefix cache hands the node out",
    ("protected", ""): "it is read when the request gives its row to the prefix cache",
    ("lengths", ""): "it is read when pages are allocated, freed, or given to the prefix cache",
    ("free_rows", ""): "nothing reads it before the row is handed out",
    ("released", ""): "nothing reads it before the page is handed out",
    ("output", ""): "it is read when the request ends or is retracted",
    ("prompt", ""): "it is read when the request is computed, or gives its row to the prefix cache",
}


@dataclass(frozen=True)
class Grade:
    """late: in how many steps after the corruption it was told, -1 if it was not.

    allowed: why it may be told later than SOON, '' if it was told soon.
    """

    verdict: str
    text: str
    tracer: str = ""
    late: int = -1
    allowed: str = ""


def sentence(note: str, page: str) -> str:
    """The page's sentence on a place that cannot be seen; '' if it has none."""
    flat = re.sub(r"\s+", " ", page)
    begin = CANNOT_SEE.get(note)
    found = begin and re.search(r"[^.]*" + re.escape(begin) + r"[^.]*\.", flat)
    return found[0].strip(" -") if found else ""


def grade(
    case: Corruption, got: Mapping[str, Any], plain: Mapping[str, Any], page: str = ""
) -> Grade:
    """got: a fork's result (``forks.Forks.end``). plain: the result of an intact fork.

    page: the text on the tracers; docs/tracers.md if it is ''. The flight recorder's findings are
    none here: they say that SGLang ended or stands, and not what was wrong before.
    """
    fired = got.get("fired")
    new = [x for x in got.get("disarmed", ()) if x not in plain.get("disarmed", ())]
    if got.get("failed"):
        return Grade(BROKEN, f"this suite failed: {got['failed']}")
    if fired is None:
        for check, headline, _ in told(got):
            return Grade(FALSE, headline, check)
        if got.get("error"):  # nothing struck, and it ended all the same
            return Grade(BROKEN, f"without a corruption it ends: {got['error']}")
        return Grade(NOTHING, "there was nothing of that kind at that moment")
    if new:
        return Grade(DISARMED, "; ".join(new))
    every = told(got)
    for check, headline, step in every:
        if check != RECORDS:
            return soon(case, fired, Grade(TOLD, headline, check, max(0, step - fired["step"])))
    if got.get("error"):
        return Grade(MISSED, f"SGLang ends, and no tracer says why: {got['error']}")
    for check, headline, _ in every:
        return Grade(MISSED, f"only the {check} says something: {headline}", check)
    if got.get("tokens") == plain.get("tokens"):
        return Grade(HARMLESS, "the same tokens")
    if said := sentence(fired.get("note", ""), page or TRACERS.read_text()):
        return Grade(LISTED, said)
    tokens, right = got.get("tokens", {}), plain.get("tokens", {})
    wrong = [rid for rid, row in right.items() if tokens.get(rid) != row]
    return Grade(MISSED, f"other tokens for {len(wrong)} of {len(right)} requests, and silence")


def told(got: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """The findings of a fork, the first one first: tracer, headline, and when it was told."""
    finding = got.get("finding")
    stopped = [(finding["check"], finding["headline"], finding["step"])] if finding else []
    # Not every finding stops the server at once.
    others = [(check, f"{check}: {kind}", step) for check, kind, step in got.get("findings") or ()]
    return sorted(stopped + others, key=lambda found: found[2])


def soon(case: Corruption, fired: Mapping[str, Any], grade: Grade) -> Grade:
    """The grade of what was told: LATE if it was told later than it must be."""
    if grade.late <= SOON:
        return grade
    why = SLOW.get((case.what, fired.get("note", ""))) or SLOW.get((case.what, ""))
    if why is None or grade.late > LIFE:
        return replace(grade, verdict=LATE)
    return replace(grade, allowed=why)
