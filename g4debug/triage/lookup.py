"""Which entries have the words that somebody looks up: a piece of a line, a finding, a kind.

Whoever looks something up has no log at hand, or types from memory: other letters' case, half a
line, the name of a check. So a text fits if it is a piece of what is asked for, or the other way
round; if none fits, what people see without a word in the log, and the entries themselves are
searched; and if these do not have the words side by side, for all of them in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from g4debug.findings.kinds import KINDS
from g4debug.triage.entry import Entry, by_title, entries
from g4debug.triage.patterns import HOLE, PATTERNS, SEEN, texts

MOST = 5
SHORTEST = 3  # characters of a text that is looked for
LOOSE = "if you mean that: its text has these words somewhere"


@dataclass(frozen=True)
class Hit:
    """entry: 0 if the advice is all that there is. text: what fits: a text, a kind or a heading.

    where: where the text must stand, or of which server, if the entry is to be right; '' if it is
    right wherever it stands.
    """

    entry: int
    text: str
    advice: str = ""
    where: str = ""


def look_up(asked: str) -> tuple[Hit, ...]:
    """The entries that have these words, the surest first; each once. MOST are for a screen."""
    words = _plain(asked)
    if len(words) < SHORTEST:
        return ()
    for among in (_kinds(words), _patterns(words), _entries(words), _any_order(words)):
        found: dict[tuple[int, str], Hit] = {}
        for hit in among:
            found.setdefault((hit.entry, hit.advice), hit)
        if found:
            return tuple(found.values())
    return ()


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").lower().split())


def _fits(text: str, words: str) -> bool:
    """Whether one is a piece of the other. A hole of the text stands for anything."""
    pieces = [_plain(piece) for piece in text.split(HOLE)]
    if any(words in piece for piece in pieces):
        return True
    if sum(map(len, pieces)) < 2 * SHORTEST:
        return False
    return re.search(".{0,300}?".join(map(re.escape, pieces)), words) is not None


def _kinds(words: str) -> Iterator[Hit]:
    """By a kind's name, as ``g4debug show`` prints it: ``page-table: use-after-free``."""
    for check, of_check in KINDS.items():
        for name, kind in of_check.items():
            if words in (name, f"{check}: {name}", f"{check} {name}"):
                said = f"{check}: {name}"
                yield Hit(by_title()[kind.entry], said)
                for title in re.findall(r"\[\[(.*?)\]\]", kind.see):
                    yield Hit(by_title()[title], f"{said}, {kind.see.partition(':')[0]}")


def _patterns(words: str) -> Iterator[Hit]:
    for pattern in PATTERNS:
        frames = [text for text in pattern.frames if len(text) > 2 * SHORTEST]
        for text in (*pattern.says, *frames):
            if _fits(text, words):
                needs = (pattern.frames and text not in frames) or pattern.server
                where = pattern.where if needs else ""
                yield Hit(pattern.entry, text.strip(), pattern.advice, where)
                break
    for of_check in KINDS.values():
        for kind in of_check.values():
            if any(_fits(text, words) for text in texts(kind)):
                yield Hit(by_title()[kind.entry], f"{kind.check}: {kind.name}")


def _seen() -> Iterator[tuple[str, tuple[int, ...]]]:
    """What people see, and no line says."""
    for rows in SEEN.values():
        yield from rows


def _any_order(asked: str) -> Iterator[Hit]:
    """All words, wherever they stand in a text, what people see, a heading or an entry."""
    words = {w for w in re.findall(r"[\w#./:-]+", asked) if len(w) >= SHORTEST or w.isdigit()}
    if not words:
        return

    def has(text: str) -> bool:
        plain = _plain(text)
        return all(re.search(rf"(?<!\w){re.escape(word)}", plain) for word in words)

    for pattern in PATTERNS:
        where = pattern.where if pattern.frames or pattern.server else ""
        for text in pattern.says:
            if has(f"{text} {pattern.where}"):
                yield Hit(pattern.entry, text.strip(), pattern.advice, where)
                break
        else:
            if pattern.advice and has(f"{pattern.says[0]} {pattern.advice}"):
                yield Hit(pattern.entry, pattern.says[0].strip(), pattern.advice, where)
    for section, rows in SEEN.items():
        for text, numbers in rows:
            if has(f"the server: {section}: {text}"):
                yield from (Hit(number, text) for number in numbers)
    for pattern in PATTERNS:
        if has(f"the server: {pattern.section}") and pattern.section in SEEN and pattern.entry:
            yield Hit(pattern.entry, pattern.section)
    for read, where in ((_title, ""), (_whole, LOOSE)):
        for one in entries().values():
            if has(read(one)):
                yield Hit(one.number, one.title, where=where)


def _entries(words: str) -> Iterator[Hit]:
    """What people see; then the entries, first those whose heading has the words."""
    for text, numbers in _seen():
        if words in _plain(text):
            yield from (Hit(number, text) for number in numbers)
    found = entries().values()
    for has in (_title, _whole):
        yield from (Hit(one.number, one.title) for one in found if words in _plain(has(one)))


def _title(one: Entry) -> str:
    return one.title


def _whole(one: Entry) -> str:
    return " ".join((one.sees, one.runs, one.means, one.helps, one.releases))
