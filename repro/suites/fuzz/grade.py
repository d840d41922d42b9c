"""Grades a corruption: whether g4debug told it, and whether it was harmless."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOLD, HARMLESS, LISTED, MISSED = "told", "harmless", "listed", "missed"
DISARMED, FALSE, NOTHING, BROKEN = "disarmed", "false", "nothing", "broken"
VERDICTS = (TOLD, HARMLESS, LISTED, MISSED, DISARMED, FALSE, NOTHING, BROKEN)
BAD = (MISSED, DISARMED, FALSE, BROKEN)
TRACERS = Path(__file__).resolve().parents[3] / "docs" / "tracers.md"
# What -> the beginning of a sentence of docs/tracers.md that says that this cannot be seen. If the
# page does not say it, the corruption is missed.
CANNOT_SEE: Mapping[str, tuple[str, ...]] = {
    "kv": (
        "changes to the last, unfinished page of a request are not seen",
        "It does not see *what* is written",
    ),
}


@dataclass(frozen=True)
class Grade:
    """late: in how many steps after the corruption it was told, -1 if it was not."""

    verdict: str
    text: str
    tracer: str = ""
    late: int = -1


def sentence(what: str, page: str) -> str:
    """The page's sentence on a corruption that cannot be seen; '' if it has none."""
    flat = re.sub(r"\s+", " ", page)
    for begin in CANNOT_SEE.get(what, ()):
        found = re.search(r"[^.]*" + re.escape(begin) + r"[^.]*\.", flat)
        if found is not None:
            return found[0].strip(" -")
    return ""


def grade(what: str, got: Mapping[str, Any], plain: Mapping[str, Any], page: str = "") -> Grade:
    """got: a fork's result (``forks.Forks.end``). plain: the result of an intact fork.

    page: the text on the tracers; docs/tracers.md if it is ''.
    """
    fired, finding = got.get("fired"), got.get("finding")
    new = [x for x in got.get("disarmed", ()) if x not in plain.get("disarmed", ())]
    if got.get("failed"):
        return Grade(BROKEN, f"this suite failed: {got['failed']}")
    if fired is None:
        if finding is not None:
            return Grade(FALSE, finding["headline"], finding["check"])
        if got.get("error"):  # nothing struck, and it ended all the same
            return Grade(BROKEN, f"without a corruption it ends: {got['error']}")
        return Grade(NOTHING, "there was nothing of that kind at that moment")
    if new:
        return Grade(DISARMED, "; ".join(new))
    if finding is not None:
        late = max(0, finding["step"] - fired["step"])
        return Grade(TOLD, finding["headline"], finding["check"], late)
    if got.get("findings"):  # nothing stops the server at once, and it is told all the same
        check, kind, _ = got["findings"][0]
        return Grade(TOLD, f"{check}: {kind}", check, 0)
    if got.get("error"):
        return Grade(MISSED, f"SGLang ends, and no tracer says why: {got['error']}")
    if got.get("tokens") == plain.get("tokens"):
        return Grade(HARMLESS, "the same tokens")
    said = sentence(what, page or TRACERS.read_text())
    if said:
        return Grade(LISTED, said)
    tokens, right = got.get("tokens", {}), plain.get("tokens", {})
    wrong = [rid for rid, row in right.items() if tokens.get(rid) != row]
    return Grade(MISSED, f"other tokens for {len(wrong)} of {len(right)} requests, and silence")
