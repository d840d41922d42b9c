"""The entries: what you see, what to run, what it means, what helps, and which releases.

An entry is the file ``entries/NN-name.md``, of at most 40 lines. Its number is in its name and in
its heading, and never changes: dumps, code and documents refer to it. What was found out on the way
(refuted theories, line numbers of one release, what was run) is in its case: the file of the same
name in ``docs/cases/`` of the repository, and in ``cases/`` beside the entries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "entries"
LONG = Path(__file__).parent / "cases"
CASES = "docs/cases"  # of the repository
MOST_LINES = 40
FORMERLY = {"The server died and only the flight recorder left a dump": 7}
PARTS = ("You see", "Run this", "It means", "What helps", "Releases")


@dataclass(frozen=True)
class Entry:
    """An entry. sees, runs, means, helps and releases: its parts, in Markdown, without their names.

    name: of its file, and of its case. fixes: the fixes and paths that *What helps* names, in its
    order. commands: the lines of its first block of code, as they are typed.
    """

    number: int
    title: str
    name: str
    sees: str
    runs: str
    means: str
    helps: str
    releases: str

    @property
    def case(self) -> str:
        """Where the long story is, from the top of the repository."""
        return f"{CASES}/{self.name}"

    @property
    def story(self) -> str:
        """The long story. Raises OSError if it cannot be read."""
        return (LONG / self.name).read_text("utf-8")

    @property
    def fixes(self) -> tuple[str, ...]:
        from g4debug import discovery

        known = set(discovery.names("fix"))
        named = re.findall(r"`([a-z0-9-]+)`", self.helps)
        return tuple(dict.fromkeys(name for name in named if name in known))

    @property
    def first_lines(self) -> str:
        """What it means, in two sentences, and where the rest is: for the report of a dump."""
        means = re.sub(r"[`*]", "", " ".join(self.means.split()))
        said = " ".join(re.split(r"(?<=[.]) (?=[A-Z])", means)[:2])
        return f"{said} More: g4debug triage {self.number}"

    @property
    def commands(self) -> tuple[str, ...]:
        block = re.search(r"```\n(.*?)\n```", self.runs, re.S)
        lines = block[1].splitlines() if block else []
        return tuple(re.sub(r"\s{2,}#.*$", "", line).strip() for line in lines if line.strip())


def parse(text: str, name: str) -> Entry:
    """The entry in a file's text. Raises ValueError that says what is missing."""
    heading = re.match(r"# (\d+)\. (.+)\n", text)
    if heading is None:
        raise ValueError(f"{name}: expected '# NN. Title' in the first line, got {text[:60]!r}")
    parts = re.split(r"^\*\*([A-Z][a-z ]+)\.\*\* ?", text[heading.end() :], flags=re.M)
    if (found := tuple(parts[1::2])) != PARTS:
        raise ValueError(f"{name}: expected the parts {', '.join(PARTS)}, got {', '.join(found)}")
    return Entry(int(heading[1]), heading[2], name, *(part.strip() for part in parts[2::2]))


@cache
def entries() -> dict[int, Entry]:
    """Number -> entry, by number. Raises ValueError if a file is no entry."""
    found = [parse(path.read_text("utf-8"), path.name) for path in sorted(FOLDER.glob("*.md"))]
    return {entry.number: entry for entry in sorted(found, key=lambda e: e.number)}


@cache
def by_title() -> dict[str, int]:
    """Title -> number. A dump's FIX and a kind's record name an entry by its title.

    The titles of before are among them, because dumps live long.
    """
    return FORMERLY | {entry.title: number for number, entry in entries().items()}
