"""The page map: a page table on a terminal, a row for each request and a column for each page.

Each cell that a kernel may dereference shows its page number. A bad one stands between arrows, so
that it is also seen without colours. The map shows the part around the bad cell and says what it
left out.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from g4debug.reporters._table_view import MEANINGS, Aside, TableView, clamp, window
from g4debug.reporters.text import Symbols, symbols_for

RID_WIDTH = 8

EMPTY = ("outside", "past")  # cells that show a symbol in place of a number
STYLES = {"good": "", "bad": "bold white on red", "zero": "yellow", "outside": "dim", "past": "dim"}


def render(view: TableView, console: Console, indent: int = 2) -> None:
    """Print the map of a table."""
    symbols, width = symbols_for(console.encoding), console.width - indent
    lines = [
        Text(f" {symbols.bullet} ".join(view.title), "dim"),
        _scale(view, width, symbols),
        Text(),
    ]
    if view.rows:
        lines += [*_grid(view, width, symbols), Text(), *_bad_list(view, width)]
    else:
        lines.append(Text("(the table has no cells)", "dim"))
    for line in lines:
        line.rstrip()
        if line.cell_len > width:  # a cut must be seen: half a number is a lie
            line.truncate(width - len(symbols.more))
            line.append(symbols.more)
        text = Text(" " * indent if line else "")
        console.print(text.append_text(line), no_wrap=True, overflow="crop", crop=True)


def _short(text: str, width: int, more: str) -> str:
    return text if len(text) <= width else text[: width - len(more)] + more


def _scale(view: TableView, width: int, s: Symbols) -> Text:
    """A line that shows the pool to scale, its edge, and how far the table goes beyond it."""
    last = view.pages - 1
    text = Text()
    text.append(f"{_short(view.pool, 12, s.more) or 'this'} pool: ", "bold")
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


def _grid(view: TableView, width: int, s: Symbols) -> list[Text]:
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
        rid = _short(row.rid, RID_WIDTH, s.more) or s.dash
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
