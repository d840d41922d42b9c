"""Text for a terminal: safe, short enough, in symbols that it has, and wrapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.text import Text

from g4debug.findings.names import clean

MAX_TEXT = 2000  # characters of one field; --json has all of it
NARROW = 20  # columns that a text gets at least, however far it is indented
OTHER_RANK = "other-rank"  # kind of the dump of a rank that found nothing
NOTHING_FOUND = "found nothing itself; saved because another rank had stopped"

T = TypeVar("T")


class Symbols(NamedTuple):
    """The symbols of one rendering. Each is one column wide, except the arrow."""

    bad_left: str = "▶"
    bad_right: str = "◀"
    pointer: str = "▶"
    down: str = "▼"
    outside: str = "░"
    past: str = "·"
    more: str = "…"
    dash: str = "–"
    line: str = "━"
    gap: str = "╌"
    edge: str = "┃"
    cross: str = "✗"
    full: str = "█"
    empty: str = "░"
    bullet: str = "·"
    arrow: str = "→"


UNICODE = Symbols()
ASCII = Symbols(
    bad_left=">", bad_right="<", pointer=">", down="v", outside="~", past=".", more="+", dash="-",
    line="=", gap="-", edge="|", cross="X", full="#", empty=".", bullet="|", arrow="->",
)  # fmt: skip


def symbols_for(encoding: str) -> Symbols:
    """UNICODE if this encoding has all of its symbols, or else ASCII."""
    try:
        "".join(UNICODE).encode(encoding)
    except (UnicodeError, LookupError):
        return ASCII
    return UNICODE


def cleaned(value: T, one: Callable[[str], str] = clean) -> T:
    """``value`` with every text in it as ``one`` makes it: in lists, mappings and dataclasses, too.

    A reporter cleans its whole input once, so that nothing can be left out.
    """
    new: object = value
    if isinstance(value, str):
        new = one(value)
    elif isinstance(value, (list, tuple)):
        new = type(value)(cleaned(item, one) for item in value)
    elif isinstance(value, dict):
        new = {cleaned(k, one): cleaned(v, one) for k, v in value.items()}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        new = dataclasses.replace(value, **cleaned(fields, one))
    return new  # type: ignore[return-value]


def shorten(text: str, width: int, more: str = "…") -> str:
    """``text``, cleaned and cut to ``width`` characters. ``more`` marks the cut."""
    text = clean(text[: 4 * width + 4])
    if len(text) <= width:
        return text
    return text[: max(0, width - len(more))] + more


def fit(text: str) -> str:
    """``text``, cleaned, and cut if it is absurdly long."""
    if len(text) > MAX_TEXT:
        return clean(text[:MAX_TEXT]) + " (cut; --json has all of it)"
    return clean(text)


def counted(number: int, what: str) -> str:
    """``1 process``, ``2 processes``."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def hang(console: Console, text: Text, head: Text | str = "", rest: int | None = None) -> None:
    """Print a text behind a head, wrapped to the console's width, without trailing spaces.

    Its further lines are indented by ``rest`` columns; None: by as many as the head has.
    """
    head = Text(head) if isinstance(head, str) else head
    rest = len(head) if rest is None else rest
    for line in text.wrap(console, max(NARROW, console.width - max(len(head), rest))):
        line.rstrip()
        console.print(Text().append_text(head).append_text(line), no_wrap=True)
        head = Text(" " * rest, head.style)
