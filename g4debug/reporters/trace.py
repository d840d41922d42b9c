"""One request's way on a terminal: where it is now, then a timeline, then what is not known."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.reporters import json
from g4debug.reporters.text import cleaned, hang, symbols_for
from g4debug.reporters.way import WAITED, Way, duration

STYLES = {"ends": "bold", "retracted": "yellow", "abort": "yellow"}


def render_json(way: Way, stream: IO[str]) -> None:
    """Write the fields of :class:`Way` as one JSON object."""
    json.write({"headline": headline(way), **vars(way)}, stream)


def headline(way: Way) -> str:
    """State, how long, pages held."""
    since = "" if way.since is None else f" {'after' if way.state == 'ended' else 'for'} "
    since += "" if way.since is None else duration(way.since)
    full, swa = way.held.full, way.held.swa
    pages = "" if full < 0 else "; holds no pages"
    if full > 0:
        pages = f"; holds {full:,} full{f' and {swa:,} SWA' if swa >= 0 else ''} pages"
    return f"request {way.request}: {way.state_text}{since}{pages}"


def render(way: Way, console: Console) -> None:
    """Print it, at most the console's width wide."""
    way = cleaned(way)
    dash = symbols_for(console.encoding).dash
    good = way.state == "ended" and not way.state_text.startswith("aborted")
    hang(console, Text(headline(way), "bold green" if good else "bold"))
    for line in _facts(way):
        hang(console, Text(line, "dim"))
    if way.finding:
        hang(console, Text(f"The finding of this dump is about it: {way.finding}", "bold red"))
    console.print()
    rows = [(_steps(m.first, m.last, dash), duration(m.at) if m.at is not None else "", m)
            for m in way.moments]  # fmt: skip
    step = max([4, *(len(r[0]) for r in rows)])
    time = max([4, *(len(r[1]) for r in rows)])
    if rows:
        console.print(Text(f"{'step':>{step}}  {'time':>{time}}  what happened", "dim"))
    above = None
    named: set[str] = set()
    for steps, at, moment in rows:
        same = (steps, at) == above
        above = steps, at
        head = Text(" " * (step + time + 4) if same else f"{steps:>{step}}  {at:>{time}}  ", "dim")
        hang(console, Text(moment.text, STYLES.get(moment.kind, "")), head)
        for page in moment.pages:
            # Where a function is, is told once.
            caller = page.caller if page.caller not in named else page.caller.partition(" ")[2]
            named.add(page.caller)
            text = f"{page.text}: {caller}" if caller else page.text
            hang(console, Text(text, "dim"), " " * (step + time + 4), step + time + 6)
    if way.unknown:
        console.print()
        for line in way.unknown:
            hang(console, Text(line, "yellow"), Text("not known  ", "yellow"))


def _facts(way: Way) -> list[str]:
    parts = []
    if way.prompt >= 0:
        hit = "" if way.matched < 0 else f", {way.matched:,} of them from the prefix cache"
        hit = ", none of them from the prefix cache" if way.matched == 0 else hit
        parts.append(f"prompt {way.prompt:,} tokens{hit}")
    if way.output >= 0:
        most = f" of at most {way.longest:,}" if way.longest >= 0 else ""
        parts.append(f"output {way.output:,}{most}")
    if way.waited >= WAITED:
        parts.append(f"waited {duration(way.waited)} in all")
    found = ["; ".join(parts)] if parts else []
    if way.verifies is not None:
        v = way.verifies
        found.append(
            f"{v.count:,} verifies, {v.tokens / v.count:.2f} tokens each, "
            f"from {v.least} to {v.most}"
        )
    return found


def _steps(first: int, last: int, dash: str) -> str:
    if first < 0:
        return dash
    return str(first) if first == last else f"{first}-{last}"
