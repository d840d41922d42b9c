"""A history as a table on a terminal. A marked row also stands out where there are no colours."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from g4debug.reporters._histories import Column, Grid, Row
from g4debug.reporters.text import fit, shorten, symbols_for

GAP = 2
MAX_CELL = 40


def render(grid: Grid, console: Console, *, everything: bool = False, indent: int = 2) -> None:
    """Print the rows to show, or all of them with ``everything``, and how many are left out."""
    s = symbols_for(console.encoding)
    rows = grid.rows if everything else grid.front
    hidden = grid.count(grid.left_out) if everything else grid.hidden
    cells = [[shorten(c, MAX_CELL, s.more) or s.dash for c in row.cells] for row in rows]
    room = console.width - indent - 2
    widths = _widths(grid.columns, cells, room)
    head = [c.name for c in grid.columns]
    _line(head, grid.columns, widths, console, Text(" " * (indent + 2)), "dim")
    more = Text(f"{'':<{indent + 2}}{s.more} {hidden} (--all)", "dim")
    if hidden and grid.newest_last:
        console.print(more, no_wrap=True, overflow="crop")
    for row, texts in zip(rows, cells, strict=True):
        gutter = Text(f"{'':<{indent}}{s.pointer if row.mark else ' '} ")
        short = [
            _cut(text, width, c.tail, s.more)
            for text, width, c in zip(texts, widths, grid.columns, strict=True)
        ]
        _line(short, grid.columns, widths, console, gutter, "bold red" if row.mark else "")
        _below(row, console, indent + 2 + widths[0] + GAP)
    if hidden and not grid.newest_last:
        console.print(more, no_wrap=True, overflow="crop")


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]], room: int) -> list[int]:
    """Each column is as wide as its texts. If room is short, some columns are cut (``gives``)."""
    widths = [max([len(c.name), *(len(r[i]) for r in cells)]) for i, c in enumerate(columns)]
    excess = sum(widths) + GAP * (len(widths) - 1) - room
    for i in sorted(range(len(columns)), key=lambda i: columns[i].gives):
        if excess > 0 and columns[i].gives:
            least = min(widths[i], max(columns[i].least, len(columns[i].name)))
            cut = min(excess, widths[i] - least)
            widths[i] -= cut
            excess -= cut
    return widths


def _cut(text: str, width: int, tail: bool, more: str) -> str:
    if tail and len(text) > width:
        return more + text[len(text) - width + len(more) :]
    return shorten(text, width, more)


def _line(
    cells: Sequence[str],
    columns: Sequence[Column],
    widths: Sequence[int],
    console: Console,
    gutter: Text,
    style: str,
) -> None:
    parts = [
        f"{cell:>{width}}" if column.right else f"{cell:<{width}}"
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    text = gutter.append((" " * GAP).join(parts).rstrip())
    text.stylize(style)
    console.print(text, no_wrap=True, overflow="crop", crop=True)


def _below(row: Row, console: Console, left: int) -> None:
    """Print what fits into no column: below the row, wrapped, from the second column on."""
    for label, text in row.below:
        head = f"{label}: " if label else ""
        body = Text().append(head, "dim").append(fit(text), "red" if row.mark else "dim")
        for i, line in enumerate(body.wrap(console, max(20, console.width - left - len(head)))):
            line.rstrip()
            hang = " " * (left + (len(head) if i else 0))
            console.print(Text(hang).append_text(line), no_wrap=True, overflow="crop")
