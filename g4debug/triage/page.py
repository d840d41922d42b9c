"""TRIAGE.md: the index and the entries on one page. It is made of them, and never edited.

``python -m g4debug.triage.page > TRIAGE.md`` writes it anew.
"""

from __future__ import annotations

import re

from g4debug.findings.kinds import KINDS
from g4debug.triage import patterns
from g4debug.triage.entry import CASES, Entry, by_title, entries
from g4debug.triage.patterns import PATTERNS, SEEN

LARGEST = 45_000  # bytes
ROOM = 70  # characters for the texts of a pattern; the first one is always shown

HEAD = """# Triage

<!-- made by `python -m g4debug.triage.page > TRIAGE.md`; edit g4debug/triage/entries -->

You have a log. `g4debug triage server.log` finds the first cause in it; `g4debug triage 17` prints
entry 17. [docs/cases](docs/cases) has what was run, line numbers and refuted theories.

"In force" means: by itself, where the installed SGLang has the bug; `g4debug fixes` says so.
Numbers such as #29352 are upstream's threads.

## Find your entry

`g4debug triage "words"` knows more texts than this page. Here, search for a piece of your line
without numbers and names; `…` stands for them.
"""
FOUND = "There is a finding of g4debug"
BEHIND = """
The line begins with `g4debug:` and the check; `g4debug show` prints the second column as `CHECK`.
On `triton`, `page-table` says `token` where this table says `page`. A line "g4debug fault
(seed=…)" is a drill: somebody injects faults.
"""
SECTIONS = (
    patterns.CUDA,
    patterns.PYTHON,
    FOUND,
    patterns.LEAK,
    patterns.HANGS,
    patterns.KILLED,
    patterns.WRONG,
    patterns.SLOW,
    patterns.START,
    patterns.ITSELF,
    patterns.OTHER,
)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def anchor(entry: Entry) -> str:
    return slug(f"{entry.number}. {entry.title}")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _linked(text: str) -> str:
    """``[[title]]`` of a kind's record as a link."""
    return re.sub(r"\[\[(.*?)\]\]", lambda m: f"[{by_title()[m[1]]}]", text)


def findings() -> list[str]:
    """Of each kind, what the log says, and the entry."""
    lines = ["| The line says | Check and kind | Entry |", "|---|---|---|"]
    for of_check in KINDS.values():
        for kind in of_check.values():
            entry = "; ".join(filter(None, (f"[[{kind.entry}]]", kind.see)))
            lines.append(_row(kind.says, f"`{kind.check}: {kind.name}`", _linked(entry)))
    return lines


def _index(section: str) -> list[str]:
    if section == FOUND:
        begin, end = "<!-- findings: every kind of every tracer -->", "<!-- /findings -->"
        return [BEHIND.strip(), "", begin, *findings(), end]
    # What is own says the same as another one, of a server that lives.
    mine = [p for p in PATTERNS if p.section == section and not p.own]
    if section == patterns.OTHER:
        once = {p.advice: p for p in reversed(mine)}  # the first one of each
        mine = [p for p in mine if once[p.advice] is p]
        rows = [_row(f"`{p.says[0].strip()}`", p.advice.partition(". ")[0]) for p in mine]
        return ["| In the log | What it is |", "|---|---|", *rows]
    lines = ["| In the log | Where, when | Entry |", "|---|---|---|"]
    for p in mine:
        # GitHub's Markdown needs two backticks around a text that has one.
        shown = [t for i, t in enumerate(p.says) if not i or sum(map(len, p.says[: i + 1])) <= ROOM]
        says = ", ".join(f"`` {t} ``" if "`" in t else f"`{t.strip()}`" for t in shown)
        numbers = ", ".join(f"[{n}]" for n in (p.entry, *p.also) if n)
        lines.append(_row(says, p.where, numbers or p.advice))
    for what, numbers_ in SEEN.get(section, ()):
        lines.append(_row("nothing", what, ", ".join(f"[{n}]" for n in numbers_)))
    return lines


def _whole(entry: Entry) -> str:
    parts = (
        ("You see", entry.sees),
        ("Run this", entry.runs),
        ("It means", entry.means),
        ("What helps", entry.helps),
        ("Releases", entry.releases),
    )
    text = "\n\n".join(
        f"**{name}.**" + ("\n\n" if said.startswith("```") else " ") + said for name, said in parts
    )
    text = re.sub(r" {3,}#", "  #", text)  # comments in a column cost a kilobyte
    more = f"[Case]({CASES}/{entry.name})"
    return f"## {entry.number}. {entry.title}\n\n{text} {more}\n"


def page() -> str:
    """The whole of TRIAGE.md."""
    parts = [HEAD]
    for section in SECTIONS:
        parts.append("\n".join([f"### {section}", "", *_index(section), ""]))
    parts += [_whole(entry) for entry in entries().values()]
    links = [f"[{n}]: #{anchor(entry)}" for n, entry in entries().items()]
    return "\n".join(parts) + "\n" + "\n".join(links) + "\n"


if __name__ == "__main__":
    print(page(), end="")
