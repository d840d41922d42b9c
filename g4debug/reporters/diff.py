"""The comparison of two dumps on a terminal: the differences, then the equal parts in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.dumps.heads import quoted
from g4debug.findings.record import TrapRecord
from g4debug.reporters import json
from g4debug.reporters.compare import Change, Part
from g4debug.reporters.text import Symbols, cleaned, fit, hang, symbols_for

SHOWN = 12  # differences of one part that are shown without --all


def render(
    dumps: Sequence[tuple[str, TrapRecord]],
    parts: Sequence[Part],
    console: Console,
    *,
    everything: bool = False,
) -> None:
    """Print the differences. ``dumps``: path and record of A and of B."""
    s = symbols_for(console.encoding)
    for letter, style, (path, record) in zip("AB", ("red", "green"), dumps, strict=True):
        console.print(Text(f"{letter}  {quoted(path)}", f"bold {style}"), soft_wrap=True)
        at = record.finding.location
        facts = [record.created, f"{record.finding.check}: {record.finding.kind}"]
        facts += [f"step {at.step}"] * (at.step >= 0) + [f"pid {at.pid}"] * (at.pid >= 0)
        hang(console, Text(fit(f" {s.bullet} ".join(facts)), "dim"), "   ")
    parts = cleaned(parts, fit)
    differ = [p for p in parts if p.changes]
    equal = [f"{p.name} ({p.same})" for p in parts if not p.changes]
    console.print(Text(s.line * console.width, "dim"), no_wrap=True, overflow="crop")
    if differ:
        names = ", ".join(p.name for p in differ)
        hang(console, Text(f"they differ in: {names}", "bold"))
    else:
        hang(console, Text("no difference", "bold green"))
    for part in differ:
        console.print()
        _part(part, console, s, None if everything else SHOWN)
    if equal:
        console.print()
        hang(console, Text("SAME  ", "bold cyan").append(", ".join(equal), "dim"), rest=6)


def render_json(
    dumps: Sequence[tuple[str, TrapRecord]], parts: Sequence[Part], stream: IO[str]
) -> None:
    """Write one JSON object: a, b (paths), same, and the parts with all their changes."""
    same = not any(p.changes for p in parts)
    json.write({"a": dumps[0][0], "b": dumps[1][0], "same": same, "parts": parts}, stream)


def _part(part: Part, console: Console, s: Symbols, limit: int | None) -> None:
    head = Text(part.name.upper(), "bold cyan")
    head.append(f"  {len(part.changes)} differ, {part.same} equal", "dim")
    if part.note:
        head.append(f"  {part.note}", "yellow")
    hang(console, head, rest=2)
    hidden = 0 if limit is None else max(0, len(part.changes) - limit)
    shown = part.changes[hidden:] if part.newest_last else part.changes[:limit]
    more = Text(f"{s.more} {hidden} {'earlier' if part.newest_last else 'more'} (--all)", "dim")
    if hidden and part.newest_last:
        hang(console, more, "  ")
    width = max((len(c.name) + 2 * (None in (c.a, c.b)) for c in shown), default=0)
    for change in shown:
        _change(change, min(width, console.width // 2), console, s)
    if hidden and not part.newest_last:
        hang(console, more, "  ")


def _change(change: Change, width: int, console: Console, s: Symbols) -> None:
    """Print ``name  a -> b`` on one line if that fits, or else one below the other."""
    name, a, b = change.name, change.a, change.b
    if a is not None and b is not None:
        line = Text(f"{name:<{width}}  ")
        line.append(a or "''", "red").append(f" {s.arrow} ", "dim").append(b or "''", "green")
        if line.cell_len + 2 <= console.width:
            hang(console, line, "  ")
            return
        hang(console, Text(name), "  ")
        hang(console, Text(f"- {a}", "red"), "    ", 6)
        hang(console, Text(f"+ {b}", "green"), "    ", 6)
        return
    sign, text, style = ("-", a, "red") if b is None else ("+", b, "green")
    label = "" if name.startswith("only in ") else f"{name:<{width - 2}}  "  # the sign says that
    hang(console, Text(f"{sign} {label}{text or ''}", style), "  ", 4)
