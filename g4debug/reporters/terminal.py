"""The report on a terminal, in the order of ``_facts.py``.

The first line says what happened, the last ones why, and what to do: a tired reader looks there.
A marked row of a history also stands out where there are no colours.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from g4debug.findings.record import TrapRecord
from g4debug.reporters import _facts, page_map
from g4debug.reporters._histories import Column, Grid
from g4debug.reporters._table_view import ROWS
from g4debug.reporters.text import Symbols, hang, symbols_for

LABEL = 10
BAR = 10
GAP = 2  # between the columns of a history
INDENT = 2
MAX_CELL = 40

TONES = {
    "": "",
    "good": "green",
    "bad": "bold red",
    "warn": "yellow",
    "dim": "dim",
    "strong": "bold",
}


def render(
    record: TrapRecord,
    console: Console,
    *,
    source: str = "",
    rows: int | None = None,
    everything: bool = False,
    before: Sequence[_facts.Entry] = (),
    after: Sequence[_facts.Entry] = (),
) -> None:
    """Print the report. source: the dump's path. before, after: see ``_facts.report``.

    rows: how many rows of the page table to show, if not the usual number. everything: show all of
    every table and history.
    """
    s = symbols_for(console.encoding)
    groups = _facts.report(
        record,
        source=source,
        most=None if everything else 0,
        words=everything,
        rows=None if everything else rows or ROWS,
        before=before,
        after=after,
    )
    hang(console, Text(_facts.headline(record), "bold white on red"))
    console.print(Text(s.line * console.width, "red"), no_wrap=True, overflow="crop")
    for i, group in enumerate(groups):
        if i:
            console.print()
        for block in group:
            _block(block, console, s)


def _block(block: _facts.Block, console: Console, s: Symbols) -> None:
    if isinstance(block, _facts.Entry):
        room, sep = console.width - LABEL, f" {s.bullet} "
        lines = [text for line in block.lines for text in _pack(line, room, sep)]
        _entry(console, block.label, *lines)
    elif isinstance(block, _facts.Pools):
        _entry(console, block.label, *[_pool(pool, s) for pool in block.pools])
    elif isinstance(block, _facts.Map):
        _section(console, block.label, block.note)
        page_map.render(block.view, console)
    elif isinstance(block, _facts.History):
        _section(console, block.label, block.note)
        history(block.grid, console)
    else:
        # A command that we broke into two lines could not be copied, so the terminal has to wrap
        # it. A picture has no terminal, so there we wrap.
        if block.note:
            _entry(console, "NOTE", Text(block.note, "yellow"))
        text = Text(f"{block.label:<{LABEL}}{block.command}", "bold cyan")
        console.print(text, soft_wrap=not console.record)


def _pool(pool: _facts.PoolUse, s: Symbols) -> Text:
    text = Text(f"{_cut(pool.name, 12, s.more):<5} {pool.size} ")
    if pool.share is None:
        return text.append("usage not known", "dim")
    filled = round(pool.share * BAR)
    style = TONES[pool.tone].removeprefix("bold ")
    text.append(s.full * filled, style).append(s.empty * (BAR - filled), "dim")
    return text.append(f" {pool.percent}", style).append(f"  {pool.tokens}", "dim")


def _pack(line: _facts.Line, width: int, sep: str) -> list[Text]:
    """The items on as few lines as they need. Only an item that is longer than a line is broken."""
    lines: list[Text] = []
    for spans in line:
        item = Text(" ").join(Text(span.text, TONES[span.tone]) for span in spans)
        if lines and lines[-1].cell_len + len(sep) + item.cell_len <= width:
            lines[-1].append(sep, "dim").append_text(item)
        else:
            lines.append(item)
    return lines


def _entry(console: Console, label: str, *lines: Text) -> None:
    """Print lines, the first of them with a label."""
    for line in lines:
        hang(console, line, Text(f"{label:<{LABEL}}", "bold cyan"))
        label = ""


def _section(console: Console, label: str, note: str) -> None:
    text = Text.assemble((f"{label} ", "bold cyan"), (note, "dim"))
    console.print(text, no_wrap=True, overflow="crop")


def history(grid: Grid, console: Console) -> None:
    """Print the rows in front, and how many there are besides."""
    s = symbols_for(console.encoding)
    cells = [[_cut(c, MAX_CELL, s.more) or s.dash for c in row.cells] for row in grid.front]
    widths = _widths(grid.columns, cells, console.width - INDENT - 2)
    head = [c.name for c in grid.columns]
    more = Text(f"{'':<{INDENT + 2}}{s.more} {grid.hidden} (--all)", "dim")
    _line(head, grid.columns, widths, console, "  ", "dim")
    if grid.hidden and grid.newest_last:
        console.print(more, no_wrap=True, overflow="crop")
    for row, texts in zip(grid.front, cells, strict=True):
        short = [
            _cut(text, width, s.more, c.tail)
            for text, width, c in zip(texts, widths, grid.columns, strict=True)
        ]
        style = "bold red" if row.mark else ""
        _line(short, grid.columns, widths, console, f"{s.pointer if row.mark else ' '} ", style)
        for label, text in row.below:  # what fits into no column, from the second column on
            note, left = f"{label}: " if label else "", INDENT + 2 + widths[0] + GAP
            body = Text().append(note, "dim").append(text, "red" if row.mark else "dim")
            hang(console, body, " " * left, left + len(note))
    if grid.hidden and not grid.newest_last:
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


def _cut(text: str, width: int, more: str, tail: bool = False) -> str:
    if len(text) <= width:
        return text
    keep = max(0, width - len(more))
    return more + text[len(text) - keep :] if tail else text[:keep] + more


def _line(
    cells: Sequence[str],
    columns: Sequence[Column],
    widths: Sequence[int],
    console: Console,
    gutter: str,
    style: str,
) -> None:
    parts = [
        f"{cell:>{width}}" if column.right else f"{cell:<{width}}"
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    text = Text(f"{'':<{INDENT}}{gutter}{(' ' * GAP).join(parts)}".rstrip())
    text.stylize(style)
    console.print(text, no_wrap=True, overflow="crop", crop=True)
