"""What ``make matrix`` prints for each fault, and the table that it writes into docs/."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.render import Block

from suites.matrix.drill import REQUESTS, WAVES, Clean, Row, tracers


def entry(row: Row, tracer: str) -> str:
    """``3``: the tracer that must catch it did so 3 steps later. ``(3)``: a tracer that need not
    catch it did. ``·``: a tracer that need not catch it did not.
    """
    if row.fired < 0:
        return "?"
    if tracer in row.caught:
        after = str(row.caught[tracer])
        return after if tracer in row.named else f"({after})"
    return "MISSED" if tracer in row.named else "·"


def block(row: Row, place: str = "") -> Block:
    """What a terminal shows of a row; the table is too wide for one."""
    what = f"{row.verdict} Without tracers a user sees: {row.seen}."
    return Block(f"{row.fault}={row.drill}", row.good, what, title=place)


def clean_block(clean: Clean) -> Block:
    what = f"Without tracers: {clean.seen}. With every tracer: {clean.verdict}."
    on = f", {clean.backend}" if clean.backend else ""
    return Block(f"no fault{on}", clean.good, what)


def markdown(clean: Sequence[Clean], rows: Iterable[Row]) -> str:
    """The table with its legend. The numbers differ a little from run to run."""
    from g4debug.trapping.describe import versions

    found = versions()
    names = tracers()
    lines = [
        f"# The matrix on SGLang {found.get('sglang', '?')}",
        "",
        "Made by `make matrix`. Every fault runs on real SGLang (CPU engine, all fixes off): once",
        "without tracers, and once with every tracer in `log` mode. A number says how many steps",
        "after the fault fired for the first time the tracer reported its first finding. A",
        "number in brackets: the tracer found it, but the fault does not name this tracer. `·`:",
        "the tracer found nothing, and need not. **MISSED**: the fault names the tracer, but it",
        "found nothing.",
        "",
        f"SGLang {found.get('sglang', '?')}, torch {found.get('torch', '?')}. Workload: {WAVES} "
        f"times {REQUESTS} requests, mixed lengths, shared prefixes, small pools.",
        *(
            f"Without a fault{f', on {c.backend}' if c.backend else ''}: {c.seen}; with every "
            f"tracer: {c.verdict}."
            for c in clean
        ),
        "",
        f"| fault | {' | '.join(names)} | without tracers the user sees |",
        f"|---|{'--:|' * len(names)}---|",
    ]
    for row in rows:
        cells = " | ".join(entry(row, t).replace("MISSED", "**MISSED**") for t in names)
        lines.append(f"| `{row.fault}={row.drill}` | {cells} | {row.seen.replace('|', '/')} |")
    return "\n".join(lines) + "\n"
