"""The page map: a page table on a terminal, a row for each request and a column for each page.

Each cell that a kernel may dereference shows its page number. A bad one stands between arrows, so
that it is also seen without colours. The map shows the part around the bad cell and says what it
left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from g4debug.findings.record import Pool, Table
from g4debug.reporters import _table_words as words
from g4debug.reporters._table_view import Cell, TableView, clamp, window
from g4debug.reporters.text import Symbols, clean, shorten, symbols_for

DEFAULT_ROWS = 12
RID_WIDTH = 8

STYLES = {
    "good": "",
    "bad": "bold white on red",
    "zero": "yellow",
    "outside": "dim",
    "past": "dim",
}


def render(
    table: Table,
    console: Console,
    *,
    row: int = -1,
    column: int = -1,
    pools: Sequence[Pool] = (),
    rows: int | None = DEFAULT_ROWS,
    indent: int = 2,
) -> None:
    """Print the map. ``row``, ``column``: the finding's cell in the whole table; -1: not known.

    ``rows``: how many rows to show (None: all). ``pools``: the other pools of the process, to say
    in which of them an out-of-range page number would have been in range.
    """
    symbols = symbols_for(console.encoding)
    view = TableView(table, row, column)
    for line in _lines(view, console.width - indent, symbols, pools, rows):
        line.rstrip()
        if line.cell_len > console.width - indent:  # a cut must be seen: half a number is a lie
            line.truncate(console.width - indent - len(symbols.more))
            line.append(symbols.more)
        text = Text(" " * indent if line else "")
        text.append_text(line)
        console.print(text, no_wrap=True, overflow="crop", crop=True)


def _lines(
    view: TableView, width: int, symbols: Symbols, pools: Sequence[Pool], limit: int | None
) -> list[Text]:
    lines = [
        Text(f" {symbols.bullet} ".join(words.title(view)), "dim"),
        _scale(view, width, symbols),
        Text(),
    ]
    if not view.rows or not view.columns:
        return [*lines, Text("(the table has no cells)", "dim")]
    shown = window(view.rows, view.focus[0], view.rows if limit is None else max(1, limit))
    lines += _grid(view, shown, width, symbols)
    lines += [Text(), *_bad_list(view, width, symbols, pools)]
    return lines


def _scale(view: TableView, width: int, s: Symbols) -> Text:
    """A line that shows the pool to scale, its edge, and how far the table goes beyond it."""
    name = shorten(view.table.pool.name, 12, s.more) or "this"
    last = view.pages - 1
    text = Text()
    text.append(f"{name} pool: ", "bold")
    text.append(f"{words.pool_range(view)} ")
    extremes = view.extremes()
    reach, inside = words.reach(view)
    if extremes is None:
        return text.append(reach, "dim")
    low, high = extremes
    over, under = high > last, low < 0
    tail = f" {reach}"
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
    text.append(tail, "green" if inside else "bold red")
    return text


def _grid(view: TableView, shown: range, width: int, s: Symbols) -> list[Text]:
    used = max(view.used_columns(shown), view.focus[1] + 1)
    used = min(view.columns, used + 1)  # one dot to show where the longest row ends
    row_width = max(3, len(str(view.row0 + shown.stop)))
    lengths = {r: words.number(int(view.table.seq_lens[r])) for r in shown}
    len_width = max(6, *map(len, lengths.values()))
    left = 2 + row_width + 1 + RID_WIDTH + 1 + len_width + 1
    # How wide a cell is decides which columns are shown, and the other way round. So take the
    # widest number that can be shown at all.
    digits = max(
        [len(words.number(c.value)) for r in shown for c in _peek(view, r, used) if _has_value(c)]
        + [len(str(view.column0 + used)), 1]
    )
    cell = digits + 2
    fit = max(1, (width - left - 2) // cell)
    columns = window(used, view.focus[1], fit)
    cut_left, cut_right = columns.start > 0, columns.stop < used

    lines = [_header(view, columns, left, cell, row_width, len_width, cut_left, cut_right, s)]
    if shown.start:
        lines.append(_more_rows(shown.start, "above", view.bad_rows(0, shown.start), s))
    for r in shown:
        has_bad = bool(view.bad[r].any())
        text = Text()
        text.append(f"{s.pointer} " if has_bad else "  ", "bold red")
        style = "bold" if has_bad else ""
        text.append(f"{view.row0 + r:>{row_width}} ", style)
        text.append(f"{_rid(view, r, s):<{RID_WIDTH}} ", style if has_bad else "cyan")
        text.append(f"{lengths[r]:>{len_width}} ", style)
        text.append(s.more if cut_left else " ", "dim")
        for c in view.cells(r, columns.start, columns.stop):
            text.append_text(_cell(c, digits, s))
        if cut_right:
            text.append(s.more, "dim")
        hidden = int(view.bad[r].sum()) - int(view.bad[r, columns.start : columns.stop].sum())
        if hidden:
            text.append(f"+{hidden}", "bold red")
        lines.append(text)
    if shown.stop < view.rows:
        below = view.rows - shown.stop
        lines.append(_more_rows(below, "below", view.bad_rows(shown.stop, view.rows), s))
    kinds = {c.kind for r in shown for c in view.cells(r, columns.start, columns.stop)}
    lines += [Text(), _legend(kinds, cut_left or cut_right, s)]
    return lines


def _peek(view: TableView, row: int, used: int) -> list[Cell]:
    """The cells near the focus that could be shown (no terminal has room for 400)."""
    near = window(used, view.focus[1], 400)
    return view.cells(row, near.start, near.stop)


def _header(
    view: TableView,
    columns: range,
    left: int,
    cell: int,
    row_width: int,
    len_width: int,
    cut_left: bool,
    cut_right: bool,
    s: Symbols,
) -> Text:
    text = Text()
    text.append(f"  {'row':>{row_width}} {'request':<{RID_WIDTH}} {'tokens':>{len_width}} ", "dim")
    text.append(s.more if cut_left else " ", "dim")
    bad = view.bad.any(dim=0)
    for c in columns:
        number = str(view.column0 + c)
        mark = bool(bad[c])
        label = f"{s.down}{number}" if mark and len(number) < cell - 1 else number
        text.append(f"{label:>{cell - 1}} ", "bold red" if mark else "dim")
    if cut_right:
        text.append(s.more, "dim")
    return text


def _cell(c: Cell, digits: int, s: Symbols) -> Text:
    if c.kind == "bad":
        number = f"{s.bad_left}{words.number(c.value)}{s.bad_right}"
        return Text(f"{'':<{digits + 2 - len(number)}}").append(number, STYLES["bad"])
    if c.kind in ("outside", "past"):
        return Text(f" {getattr(s, c.kind):>{digits}} ", STYLES[c.kind])
    return Text(f" {words.number(c.value):>{digits}} ", STYLES[c.kind])


def _has_value(c: Cell) -> bool:
    return c.kind in ("bad", "good", "zero")


def _rid(view: TableView, row: int, s: Symbols) -> str:
    return shorten(words.rid(view, row), RID_WIDTH, s.more) or s.dash


def _more_rows(count: int, where: str, bad: int, s: Symbols) -> Text:
    text = Text(f"  {s.more} {count} more row{'s' * (count != 1)} {where}", "dim")
    if bad:
        text.append(f" ({bad} with bad cells)", "not dim bold red")
    return text


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
            text.append(f" {words.MEANINGS[kind]}", "dim")
    if cropped:
        text.append("   ")
        text.append(s.more).append(" left out", "dim")
    return text


def _bad_list(view: TableView, width: int, s: Symbols, pools: Sequence[Pool]) -> list[Text]:
    """The bad cells with their exact values, on one line if they fit, or else on one line each."""
    cells, more = words.bad_cells(view)
    if not cells:
        return [Text(words.bad_head(view), "dim")]
    items = []
    for cell in cells:
        item = Text(f"row {cell.row} column {cell.column} = ")
        item.append(str(cell.value), "bold red")
        items.append(item if cell.shown else item.append(" (not saved)", "dim"))
    if more:
        items.append(Text(f"{more} more"))
    head = Text(words.bad_head(view), "bold")
    one = Text("; ").join(items)
    if len(head) + len(one) <= width:
        lines = [Text().append_text(head).append_text(one)]
    else:
        lines = [head, *(Text("  ").append_text(item) for item in items)]
    return lines + [Text(clean(line)) for line in words.elsewhere(view, pools)]
