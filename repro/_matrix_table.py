"""The matrix for a terminal, and for docs/matrix.md."""

from __future__ import annotations

from collections.abc import Iterable

from _matrix import REQUESTS, WAVES, Clean, Row, tracers
from rich.console import Console
from rich.table import Table


def cell(row: Row, tracer: str) -> str:
    """``after 3`` caught as named, ``(after 3)`` caught though not named, ``·`` silent."""
    if row.fired < 0:
        return "?"
    if tracer in row.caught:
        after = str(row.caught[tracer])
        return after if tracer in row.named else f"({after})"
    return "MISSED" if tracer in row.named else "·"


def render(clean: Clean, rows: Iterable[Row], console: Console) -> None:
    table = Table(title="steps from the firing to the finding")
    table.add_column("fault")
    for tracer in tracers():
        table.add_column(tracer, justify="right")
    table.add_column("without tracers the user sees", overflow="fold")
    for row in rows:
        cells = [cell(row, t) for t in tracers()]
        style = "" if row.good else "red"
        table.add_row(f"{row.fault}={row.drill}", *cells, row.seen, style=style)
    console.print(table)


def markdown(clean: Clean, rows: Iterable[Row]) -> str:
    """The table with its legend. Numbers depend on the run; ``make matrix`` makes them anew."""
    from g4debug.trapping.describe import versions

    found = versions()
    names = tracers()
    lines = [
        "# The matrix",
        "",
        "Made by `make matrix`: every fault on real SGLang (CPU engine, all fixes off), once",
        "without tracers and once with every tracer in `log` mode. A number is how many worker",
        "steps after the first firing the tracer's first finding came; in brackets: the fault does",
        "not name that tracer; `·`: silent; **MISSED**: named, and silent.",
        "",
        f"SGLang {found.get('sglang', '?')}, torch {found.get('torch', '?')}. Workload: {WAVES} "
        f"times {REQUESTS} requests, mixed lengths, shared prefixes, small pools.",
        f"Without a fault: {clean.seen}; with every tracer: {clean.verdict}.",
        "",
        f"| fault | {' | '.join(names)} | without tracers the user sees |",
        f"|---|{'--:|' * len(names)}---|",
    ]
    for row in rows:
        cells = " | ".join(cell(row, t).replace("MISSED", "**MISSED**") for t in names)
        lines.append(f"| `{row.fault}={row.drill}` | {cells} | {row.seen.replace('|', '/')} |")
    return "\n".join(lines) + "\n"
