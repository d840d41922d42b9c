"""The dumps of a folder, one line each, newest first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.reporters.text import clean, shorten, symbols_for

WIDE = 120  # a console this wide has room for whole file names
CHECK_WIDTH = 15  # as long as "flight-recorder"


@dataclass(frozen=True)
class Entry:
    """One file. ``time``: ISO 8601 in UTC. ``size``: bytes. ``broken``: why it is, or ''."""

    path: str
    name: str
    time: str
    check: str
    headline: str
    size: int
    broken: str = ""


def render(entries: Sequence[Entry], console: Console) -> None:
    """Print the list. A narrow terminal shows only the end of each file's name."""
    s = symbols_for(console.encoding)
    wide = console.width >= WIDE
    names = [clean(e.name) if wide else f"*{_tail(clean(e.name))}" for e in entries]
    name_width = max(4, *map(len, names))
    check_width = min(CHECK_WIDTH, max(5, *(len(e.check or "BROKEN") for e in entries)))
    room = max(16, console.width - 19 - 2 - check_width - 2 - 9 - name_width - 2)
    head = f"{'time (UTC)':<19}  {'check':<{check_width}}  {'what':<{room}} {'size':>6}  file"
    console.print(Text(head, "dim"), no_wrap=True, overflow="crop")
    for entry, name in zip(entries, names, strict=True):
        text = Text(f"{_time(entry.time):<19}  ")
        check = "BROKEN" if entry.broken else shorten(entry.check, check_width, s.more)
        text.append(f"{check:<{check_width}}  ", "yellow" if entry.broken else "cyan")
        what = Text(shorten(entry.broken or _what(entry), room, s.more))
        what.pad_right(max(0, room - what.cell_len))
        what.stylize("yellow" if entry.broken else "bold")
        text.append_text(what).append(f" {_size(entry.size):>6}  ", "dim").append(name)
        console.print(text, no_wrap=True, overflow="ignore", crop=False)


def render_json(entries: Sequence[Entry], stream: IO[str]) -> None:
    """Write a JSON list of objects with the fields of :class:`Entry`."""
    json.dump([asdict(e) for e in entries], stream, indent=2)
    stream.write("\n")


def _what(entry: Entry) -> str:
    """The headline without what the other columns already say."""
    return entry.headline.removeprefix("g4debug: ").removeprefix(entry.check).lstrip(": ")


def _tail(name: str) -> str:
    """``-4711-1.pt``: with a ``*`` in front, a shell finds the file by it."""
    parts = name.rsplit("-", 2)
    return f"-{parts[1]}-{parts[2]}" if len(parts) == 3 else name


def _time(iso: str) -> str:
    return clean(iso[:19].replace("T", " "))


def _size(size: int) -> str:
    value = float(size)
    for unit in ("B", "K", "M"):
        if value < 1000:
            return f"{value:.0f}{unit}" if unit == "B" or value >= 10 else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}G"
