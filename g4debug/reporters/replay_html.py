"""The result of ``g4debug replay`` as one HTML page, for a ticket."""

from __future__ import annotations

from g4debug.dumps.heads import quoted
from g4debug.findings.record import TrapRecord
from g4debug.reporters import _facts, pages
from g4debug.reporters.html import environment
from g4debug.reporters.replay import Replayed
from g4debug.reporters.text import cleaned, fit

ENDS = {0: "same", 1: "other", 2: "open"}
THERE = ("WHERE", "CHECK", "EXPECTED", "GOT", "OWNER", "CAUSE", "FIX")  # of the dump's report


def render(result: Replayed, record: TrapRecord, source: str) -> str:
    """The page. record: the dump that was replayed. source: its path."""
    result = cleaned(result, fit)
    asked = record.finding.kind == "asked"
    found = () if asked else _facts.report(record, source=source)
    return pages.page(
        environment(),
        "replay",
        record.created,
        title=result.text,
        result=result,
        end=ENDS.get(result.code, ""),
        source=fit(quoted(source)),
        there="" if asked else _facts.headline(record),
        entries=[b for group in found for b in group if getattr(b, "label", "") in THERE],
        command=fit(_next(result, record, source)),
    )


def _next(result: Replayed, record: TrapRecord, source: str) -> str:
    if result.shrunk is not None and result.shrunk.file:
        return f"g4debug show {quoted(result.shrunk.file)}"
    if 0 <= result.equal < result.steps and not result.differs:  # not all of it was replayed
        return f"g4debug replay {quoted(source)}"
    if result.code == 0 and record.finding.kind != "asked":
        return f"g4debug replay {quoted(source)} --pages-only --shrink small.pt"
    return f"g4debug show {quoted(source)}"
