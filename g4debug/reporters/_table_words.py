"""The words beside a page map: the table's shape, its page numbers, its bad cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from g4debug.findings.record import Pool, Table
from g4debug.reporters._table_view import BIG, BadCell, TableView

MAX_DIGITS = 7  # a longer number is rounded in its cell; the list below the map has it exactly
MAX_LISTED = 4

MEANINGS = {
    "good": "page read",
    "bad": "BAD",
    "zero": "reserved page",
    "outside": "before the window",
    "past": "past the end",
}


def number(value: int) -> str:
    """The number in at most MAX_DIGITS characters; a longer one is rounded."""
    text = str(value)
    return text if len(text) <= MAX_DIGITS else f"{value:.0e}".replace("e+", "e")


def unit(table: Table) -> str:
    """What a cell names: a page, or in the lists of the triton backend a token."""
    return "token" if table.pool.page_size == 1 else "page"


def title(view: TableView) -> list[str]:
    """The shape, the window, and which part of the table was saved."""
    table = view.table
    rows = "row" if view.rows_total == 1 else "rows"
    size = table.pool.page_size
    cells = f"{unit(table)}s" + (f" of {size}" if size > 1 else "")
    parts = [f"{view.rows_total} {rows} x {view.columns_total} {cells}"]
    parts.append(f"window {table.window} tokens" if table.window >= 0 else "no window")
    if table.q_len != 1:
        parts.append(f"{table.q_len} query tokens per row")
    if (view.rows, view.columns) != (view.rows_total, view.columns_total):
        last_row, last_column = view.row0 + view.rows - 1, view.column0 + view.columns - 1
        parts.append(f"saved: rows {view.row0}..{last_row}, columns {view.column0}..{last_column}")
    return parts


def pool_range(view: TableView) -> str:
    cells = f"{unit(view.table)}s"
    return f"{cells} 0..{view.pages - 1}" if view.pages else f"no {cells}"


def reach(view: TableView, number: Callable[[int], str] = number) -> tuple[str, bool]:
    """How far the page numbers of the table go, and whether all are inside the pool.

    number: how a page number is written.
    """
    extremes = view.extremes()
    if extremes is None:
        return "(the kernel reads no cell)", True
    low, high = extremes
    if low < 0:
        return f"table goes from {number(low)} to {number(high)}", False
    if high >= view.pages:
        return f"table goes up to {number(high)}", False
    return f"table goes up to {number(high)}: inside", True


def bad_head(view: TableView) -> str:
    count = view.bad_count
    return f"{count} bad cell{'s' * (count != 1)}: " if count else "no bad cell in this table"


def bad_cells(view: TableView) -> tuple[list[BadCell], int]:
    """The first bad cells, and how many more there are."""
    cells = view.bad_cells(MAX_LISTED)
    return cells, view.bad_count - len(cells)


def elsewhere(view: TableView, pools: Sequence[Pool]) -> list[str]:
    """The other pools in which the bad page numbers would be valid: they may have been mixed up."""
    values = [c.value for c in view.bad_cells(MAX_LISTED)]
    lines = []
    for pool in pools if any(v < 0 or v >= view.pages for v in values) else ():
        if pool.name != view.table.pool.name and all(0 <= v < pool.pages <= BIG for v in values):
            which = str(values[0]) if len(set(values)) == 1 else "all of these"
            lines.append(f"{which} would be inside the {pool.name} pool: 0..{pool.pages - 1}")
    return lines


def rid(view: TableView, row: int) -> str:
    """The request of a row of the saved part; '' if not known.

    A row without a request is padding if all that it reads is the reserved page 0.
    """
    if not view.table.rids:
        return ""
    read = view.values[row][view.live[row]]
    pads = not view.bad[row].any() and not read.any()
    return view.table.rids[row] or ("(pad)" if pads else "")
