"""Text that is safe and short enough for a terminal, and the symbols it may use."""

from __future__ import annotations

from dataclasses import dataclass, fields

MAX_TEXT = 2000  # characters of one field; --json has all of it


@dataclass(frozen=True)
class Symbols:
    """The glyphs of one rendering. Each is one column wide, but for the arrow."""

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
    """UNICODE if a stream of this encoding can carry it, else ASCII."""
    try:
        "".join(getattr(UNICODE, f.name) for f in fields(Symbols)).encode(encoding)
    except (UnicodeError, LookupError):
        return ASCII
    return UNICODE


def clean(text: str) -> str:
    """``text`` with every character that is not printable written as an escape.

    A dump may come from a stranger: an escape sequence in a request id must not reach the
    terminal, nor a newline or a right-to-left mark rearrange the report.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text
    )


def shorten(text: str, width: int, more: str = "…") -> str:
    """``text`` cleaned and cut to ``width`` characters, the cut marked by ``more``."""
    text = clean(text[: 4 * width + 4])
    if len(text) <= width:
        return text
    return text[: max(0, width - len(more))] + more


def fit(text: str) -> str:
    """``text`` cleaned, and cut where it is absurdly long."""
    if len(text) > MAX_TEXT:
        return clean(text[:MAX_TEXT]) + " (cut; --json has all)"
    return clean(text)
