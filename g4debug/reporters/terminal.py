"""The report on a terminal, in the order of ``_facts.py``.

The first line says what happened, the last ones why, and what to do: a tired reader looks there.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from g4debug.findings.record import Pool, TrapRecord
from g4debug.reporters import _facts, _grid, page_map
from g4debug.reporters._histories import percent
from g4debug.reporters.text import Symbols, fit, shorten, symbols_for

LABEL = 10
BAR = 10

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
    rows: int | None = page_map.DEFAULT_ROWS,
    everything: bool = False,
    before: Sequence[_facts.Entry] = (),
    after: Sequence[_facts.Entry] = (),
) -> None:
    """Print the report. source: the dump's path. before, after: see ``_facts.report``.

    rows: how many rows of the page table to show, None for all. everything: show all of every
    history, too.
    """
    s = symbols_for(console.encoding)
    for line in Text(fit(_facts.headline(record))).wrap(console, console.width):
        line.rstrip()
        line.stylize("bold white on red")
        console.print(line)
    console.print(Text(s.line * console.width, "red"), no_wrap=True, overflow="crop")
    most = None if everything else 0
    groups = _facts.report(
        record, source=source, most=most, words=everything, before=before, after=after
    )
    for i, group in enumerate(groups):
        if i:
            console.print()
        for block in group:
            _block(block, console, s, rows, everything)


def _block(
    block: _facts.Block, console: Console, s: Symbols, rows: int | None, everything: bool
) -> None:
    if isinstance(block, _facts.Entry):
        room, sep = console.width - LABEL, f" {s.bullet} "
        lines = [text for line in block.lines for text in _pack(line, room, sep)]
        _entry(console, block.label, *lines)
    elif isinstance(block, _facts.Pools):
        _entry(console, block.label, *[_pool(pool, s) for pool in block.pools])
    elif isinstance(block, _facts.Map):
        _section(console, block.label, block.note)
        page_map.render(
            block.table, console, row=block.row, column=block.column, pools=block.pools, rows=rows
        )
    elif isinstance(block, _facts.History):
        _section(console, block.label, block.note)
        _grid.render(block.grid, console, everything=everything)
    else:
        # A command that we broke into two lines could not be copied, so the terminal has to wrap
        # it. A picture has no terminal, so there we wrap.
        if block.note:
            _entry(console, "NOTE", Text(fit(block.note), "yellow"))
        text = Text(f"{block.label:<{LABEL}}{fit(block.command)}", "bold cyan")
        console.print(text, soft_wrap=not console.record)


def _pool(pool: Pool, s: Symbols) -> Text:
    text = Text(f"{shorten(pool.name, 12, s.more):<5} {pool.pages} pages of {pool.page_size} ")
    usage = pool.usage
    if usage is None:
        return text.append("usage not known", "dim")
    share = max(0.0, min(usage, 1.0))
    filled = round(share * BAR)
    style = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"
    text.append(s.full * filled, style).append(s.empty * (BAR - filled), "dim")
    text.append(f" {percent(pool.used_tokens, pool.tokens)}", style)
    return text.append(f"  {pool.used_tokens} of {pool.tokens} tokens", "dim")


def _pack(line: _facts.Line, width: int, sep: str) -> list[Text]:
    """The items on as few lines as they need. Only an item that is longer than a line is broken."""
    lines: list[Text] = []
    for item in map(_item, line):
        if lines and lines[-1].cell_len + len(sep) + item.cell_len <= width:
            lines[-1].append(sep, "dim").append_text(item)
        else:
            lines.append(item)
    return lines


def _item(spans: Sequence[_facts.Span]) -> Text:
    return Text(" ").join(Text(fit(span.text), TONES[span.tone]) for span in spans)


def _entry(console: Console, label: str, *lines: Text) -> None:
    """Print lines with a label, wrapped with a hanging indent and without trailing spaces."""
    for line in lines:
        for part in line.wrap(console, console.width - LABEL):
            part.rstrip()
            text = Text(f"{label:<{LABEL}}", "bold cyan", end="")
            label = ""
            console.print(Text().append_text(text).append_text(part), no_wrap=True)


def _section(console: Console, label: str, note: str) -> None:
    text = Text.assemble((f"{label} ", "bold cyan"), (note, "dim"))
    console.print(text, no_wrap=True, overflow="crop")
