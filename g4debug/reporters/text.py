"""Makes text safe and short enough for a terminal, and says which symbols it may use."""

from __future__ import annotations

from dataclasses import dataclass, fields

MAX_TEXT = 2000  # characters of one field; --json has all of it
OTHER_RANK = "other-rank"  # kind of the dump of a rank that found nothing
NOTHING_FOUND = "found nothing itself; saved because another rank had stopped"


@dataclass(frozen=True)
class Symbols:
    """The symbols of one rendering. Each is one column wide, except the arrow."""

    bad_left: str
    bad_right: str
    pointer: str
    down: str
    outside: str
    past: str
    unknown: str
    more: str
    dash: str
    line: str
    gap: str
    edge: str
    cross: str
    full: str
    empty: str
    bullet: str
    arrow: str


UNICODE = Symbols(
    bad_left="▶",
    bad_right="◀",
    pointer="▶",
    down="▼",
    outside="░",
    past="·",
    unknown="?",
    more="…",
    dash="–",
    line="━",
    gap="╌",
    edge="┃",
    cross="✗",
    full="█",
    empty="░",
    bullet="·",
    arrow="→",
)
ASCII = Symbols(
    bad_left=">",
    bad_right="<",
    pointer=">",
    down="v",
    outside="~",
    past=".",
    unknown="?",
    more="+",
    dash="-",
    line="=",
    gap="-",
    edge="|",
    cross="X",
    full="#",
    empty=".",
    bullet="|",
    arrow="->",
)


def symbols_for(encoding: str) -> Symbols:
    """UNICODE if this encoding has all of its symbols, or else ASCII."""
    try:
        "".join(getattr(UNICODE, f.name) for f in fields(Symbols)).encode(encoding)
    except (UnicodeError, LookupError):
        return ASCII
    return UNICODE


def clean(text: str) -> str:
    """``text`` with every character that is not printable written as an escape.

    A dump may come from a stranger. An escape sequence in a request id must not reach the
    terminal, and neither a newline nor a right-to-left mark may rearrange the report.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text
    )


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
