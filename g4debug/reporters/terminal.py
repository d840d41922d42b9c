"""The report on a terminal, in the order of ``_facts.py``.

The first line says what happened, the last ones why, and what to do: a tired reader looks there.
A marked row of a history also stands out where there are no colours.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from g4debug.findings.record import TrapRecord
from g4debug.reporters import _facts
from g4debug.reporters._evidence import (
    MEANINGS,
    ROWS,
    Aside,
    Column,
    Grid,
    TableView,
    clamp,
    window,
)
from g4debug.reporters.text import Symbols, hang, symbols_for

LABEL = 10
BAR = 10
GAP = 2  # between the columns of a history
INDENT = 2
MAX_CELL = 40
RID_WIDTH = 8

EMPTY = ("outside", "past")  # cells that show a symbol in place of a number
STYLES = {"good": "", "bad": "bold white on red", "zero": "yellow", "outside": "dim", "past": "dim"}

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


def entries(some: Sequence[_facts.Block], console: Console) -> None:
    """Print a few blocks alone, as they stand in a report."""
    for block in some:
        _block(block, console, symbols_for(console.encoding))


def _block(block: _facts.Block, console: Console, s: Symbols) -> None:
    if isinstance(block, _facts.Entry):
        room, sep = console.width - LABEL, f" {s.bullet} "
        lines = [text for line in block.lines for text in _pack(line, room, sep)]
        _entry(console, block.label, *lines)
    elif isinstance(block, _facts.Pools):
        _entry(console, block.label, *[_pool(pool, s) for pool in block.pools])
    elif isinstance(block, _facts.Map):
        _section(console, block.label, block.note)
        page_map(block.view, console)
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


def page_map(view: TableView, console: Console) -> None:
    """Print a page table: a row for each request and a column for each page.

    Each cell that a kernel may dereference shows its page number. A bad one stands between arrows,
    so that it is also seen without colours. Only the part around the bad cell is printed, and what
    was left out is said.
    """
    symbols, width = symbols_for(console.encoding), console.width - INDENT
    lines = [
        Text(f" {symbols.bullet} ".join(view.title), "dim"),
        _scale(view, width, symbols),
        Text(),
    ]
    if view.rows:
        lines += [*_map_rows(view, width, symbols), Text(), *_bad_list(view, width)]
    else:
        lines.append(Text("(the table has no cells)", "dim"))
    for line in lines:
        line.rstrip()
        if line.cell_len > width:  # a cut must be seen: half a number is a lie
            line.truncate(width - len(symbols.more))
            line.append(symbols.more)
        text = Text(" " * INDENT if line else "")
        console.print(text.append_text(line), no_wrap=True, overflow="crop", crop=True)


def _scale(view: TableView, width: int, s: Symbols) -> Text:
    """A line that shows the pool to scale, its edge, and how far the table goes beyond it."""
    last = view.pages - 1
    text = Text()
    text.append(f"{_cut(view.pool, 12, s.more) or 'this'} pool: ", "bold")
    text.append(f"{view.pool_range} ")
    if view.extremes is None:
        return text.append(view.reach, "dim")
    low, high = view.extremes
    over, under = high > last, low < 0
    tail = f" {view.reach}"
    fixed = len(text) + len(tail) + len(f"{s.edge} edge {s.edge}{s.cross}") + 5 * under
    room = clamp(width - fixed, 8, 40)
    if under:
        text.append(f"{s.cross}{s.gap * 3}{s.edge}", "bold red")
    beyond = clamp(round(room * (high - last) / max(1, high)), 2, room - 4) if over else 0
    filled = (
        room - beyond if over else clamp(round(room * (high + 1) / max(1, view.pages)), 1, room)
    )
    text.append(s.line * filled, "green")
    text.append(s.gap * (room - beyond - filled), "dim")
    text.append(f"{s.edge} edge {s.edge}", "bold")
    if over:
        text.append(s.gap * beyond + s.cross, "bold red")
    text.append(tail, "green" if view.inside else "bold red")
    return text


def _map_rows(view: TableView, width: int, s: Symbols) -> list[Text]:
    row_width = max(3, len(str(view.rows[-1].number + 1)))
    len_width = max(6, *(len(row.tokens) for row in view.rows))
    left = 2 + row_width + 1 + RID_WIDTH + 1 + len_width + 1
    # How wide a cell is decides which columns are shown, and the other way round. So take the
    # widest number that can be shown at all.
    near = len(view.bad_columns)
    values = [text for row in view.rows for kind, text in row.cells if kind not in EMPTY]
    digits = max([len(text) for text in values] + [len(str(view.column0 + near + view.after)), 1])
    fit = max(1, (width - left - 2) // (digits + 2))
    columns = window(near, view.focus[1] - view.column0, fit)
    cut_left = s.more if view.before or columns.start else " "
    cut_right = s.more if view.after or columns.stop < near else ""

    head = Text().append(
        f"  {'row':>{row_width}} {'request':<{RID_WIDTH}} {'tokens':>{len_width}} ", "dim"
    )
    head.append(cut_left, "dim")
    for c in columns:
        number = str(view.column0 + c)
        mark = view.bad_columns[c]
        label = f"{s.down}{number}" if mark and len(number) <= digits else number
        head.append(f"{label:>{digits + 1}} ", "bold red" if mark else "dim")
    lines = [head.append(cut_right, "dim"), *_more_rows(view.above, "above", s)]
    kinds = set()
    for row in view.rows:
        cells = row.cells[columns.start : columns.stop]
        rid = _cut(row.rid, RID_WIDTH, s.more) or s.dash
        style = "bold" if row.bad else ""
        text = Text()
        text.append(f"{s.pointer} " if row.bad else "  ", "bold red")
        text.append(f"{row.number:>{row_width}} ", style)
        text.append(f"{rid:<{RID_WIDTH}} ", style or "cyan")
        text.append(f"{row.tokens:>{len_width}} ", style)
        text.append(cut_left, "dim")
        for kind, number in cells:
            text.append_text(_cell(kind, number, digits, s))
        text.append(cut_right, "dim")
        kinds |= {kind for kind, _ in cells}
        hidden = row.bad - sum(kind == "bad" for kind, _ in cells)
        lines.append(text.append(f"+{hidden}", "bold red") if hidden else text)
    cropped = bool(cut_right) or cut_left != " "
    return [*lines, *_more_rows(view.below, "below", s), Text(), _legend(kinds, cropped, s)]


def _cell(kind: str, number: str, digits: int, s: Symbols) -> Text:
    if kind == "bad":
        number = f"{s.bad_left}{number}{s.bad_right}"
        return Text(f"{'':<{digits + 2 - len(number)}}").append(number, STYLES["bad"])
    text = getattr(s, kind) if kind in EMPTY else number
    return Text(f" {text:>{digits}} ", STYLES[kind])


def _more_rows(aside: Aside, where: str, s: Symbols) -> list[Text]:
    if not aside.rows:
        return []
    text = Text(f"  {s.more} {aside.rows} more row{'s' * (aside.rows != 1)} {where}", "dim")
    if aside.bad:
        text.append(f" ({aside.bad} with bad cells)", "not dim bold red")
    return [text]


def _legend(kinds: set[str], cropped: bool, s: Symbols) -> Text:
    samples = {
        "good": "12",
        "bad": f"{s.bad_left}n{s.bad_right}",
        "zero": "0",
        "outside": s.outside,
        "past": s.past,
    }
    text = Text()
    for kind, sample in samples.items():
        if kind in kinds:
            text.append("   " if text else "").append(sample, STYLES[kind])
            text.append(f" {MEANINGS[kind]}", "dim")
    if cropped:
        text.append("   ")
        text.append(s.more).append(" left out", "dim")
    return text


def _bad_list(view: TableView, width: int) -> list[Text]:
    """The bad cells with their exact values, on one line if they fit, or else on one line each."""
    if not view.bad:
        return [Text(view.bad_head, "dim")]
    items = []
    for cell in view.bad:
        item = Text(f"row {cell.row} column {cell.column} = ")
        item.append(str(cell.value), "bold red")
        items.append(item if cell.shown else item.append(" (not saved)", "dim"))
    if view.more_bad:
        items.append(Text(f"{view.more_bad} more"))
    head = Text(view.bad_head, "bold")
    one = Text("; ").join(items)
    if len(head) + len(one) <= width:
        lines = [Text().append_text(head).append_text(one)]
    else:
        lines = [head, *(Text("  ").append_text(item) for item in items)]
    return lines + [Text(line) for line in view.elsewhere]
