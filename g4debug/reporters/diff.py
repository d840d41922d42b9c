"""The comparison of two dumps on a terminal: first what differs, then what is equal, in a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.dumps.heads import quoted
from g4debug.findings.record import TrapRecord
from g4debug.reporters.compare import Change, Part
from g4debug.reporters.text import Symbols, fit, symbols_for

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
        _print(console, Text(fit(f" {s.bullet} ".join(facts)), "dim"), 3)
    differ = [p for p in parts if p.changes]
    equal = [f"{p.name} ({p.same})" for p in parts if not p.changes]
    console.print(Text(s.line * console.width, "dim"), no_wrap=True, overflow="crop")
    if differ:
        names = ", ".join(p.name for p in differ)
        _print(console, Text(f"they differ in: {names}", "bold"), 0)
    else:
        _print(console, Text("no difference", "bold green"), 0)
    for part in differ:
        console.print()
        _part(part, console, s, None if everything else SHOWN)
    if equal:
        console.print()
        _print(console, Text("SAME  ", "bold cyan").append(", ".join(equal), "dim"), 0, 6)


def render_json(
    dumps: Sequence[tuple[str, TrapRecord]], parts: Sequence[Part], stream: IO[str]
) -> None:
    """Write one JSON object: a, b (paths), same, and the parts with all their changes."""
    data = {
        "a": dumps[0][0],
        "b": dumps[1][0],
        "same": not any(p.changes for p in parts),
        "parts": [asdict(p) for p in parts],
    }
    json.dump(data, stream, indent=2)
    stream.write("\n")


def _part(part: Part, console: Console, s: Symbols, limit: int | None) -> None:
    head = Text(part.name.upper(), "bold cyan")
    head.append(f"  {len(part.changes)} differ, {part.same} equal", "dim")
    if part.note:
        head.append(f"  {part.note}", "yellow")
    _print(console, head, 0, 2)
    hidden = 0 if limit is None else max(0, len(part.changes) - limit)
    shown = part.changes[hidden:] if part.newest_last else part.changes[:limit]
    more = Text(f"{s.more} {hidden} {'earlier' if part.newest_last else 'more'} (--all)", "dim")
    if hidden and part.newest_last:
        _print(console, more, 2)
    width = max((len(fit(c.name)) + 2 * (None in (c.a, c.b)) for c in shown), default=0)
    for change in shown:
        _change(change, min(width, console.width // 2), console, s)
    if hidden and not part.newest_last:
        _print(console, more, 2)


def _change(change: Change, width: int, console: Console, s: Symbols) -> None:
    """Print ``name  a -> b`` on one line if that fits, or else one below the other."""
    name = fit(change.name)
    if change.a is not None and change.b is not None:
        a, b = fit(change.a), fit(change.b)
        line = Text(f"{name:<{width}}  ")
        line.append(a or "''", "red").append(f" {s.arrow} ", "dim").append(b or "''", "green")
        if line.cell_len + 2 <= console.width:
            _print(console, line, 2)
            return
        _print(console, Text(name), 2)
        _print(console, Text(f"- {a}", "red"), 4, 6)
        _print(console, Text(f"+ {b}", "green"), 4, 6)
        return
    sign, text, style = ("-", change.a, "red") if change.b is None else ("+", change.b, "green")
    if name.startswith("only in "):  # the sign says that already
        _print(console, Text(f"{sign} {fit(text or '')}", style), 2, 4)
    else:
        _print(console, Text(f"{sign} {name:<{width - 2}}  {fit(text or '')}", style), 2, 4)


def _print(console: Console, text: Text, left: int, hang: int | None = None) -> None:
    """Print a text wrapped to the width. ``left`` indents its first line, ``hang`` the others."""
    margin = left if hang is None else max(left, hang)
    for i, line in enumerate(text.wrap(console, max(20, console.width - margin))):
        line.rstrip()
        console.print(Text(" " * (margin if i else left)).append_text(line), no_wrap=True)
