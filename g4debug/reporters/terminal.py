"""The report for a person at a terminal, in KFENCE's order.

Headline, location, expected and got (with the page map), owner and history, environment,
cause and fix, next command. The first line answers "what", the last ones "why" and "do this":
the two places a tired eye lands on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from g4debug.record import Location, Plain, Pool, TrapRecord
from g4debug.reporters import page_map, steps
from g4debug.reporters._text import Symbols, clean, shorten, symbols_for

LABEL = 10
BAR = 10
MAX_TEXT = 2000  # characters of one field; --json has all of it
MAX_ITEMS = 40  # entries of one environment line

OFF_WORDS = ("off", "target-missing", "disabled", "missing", "failed")


def render(
    record: TrapRecord,
    console: Console,
    *,
    source: str = "",
    rows: int | None = page_map.DEFAULT_ROWS,
    last_steps: int | None = steps.DEFAULT_STEPS,
) -> None:
    """Print the report. ``source``: the dump's path; limits of None show everything."""
    s = symbols_for(console.encoding)
    f = record.finding
    _headline(record, console, s)
    _entry(console, "WHERE", *_where(f.location, s))
    _entry(console, "CHECK", _say(f"{f.check}: {f.kind}, at {f.site}"))
    if record.faults:
        n = len(record.faults)
        drill = f"{n} injected fault{'s' * (n != 1)} fired in this process: this may be a drill"
        _entry(console, "NOTE", Text(drill, "bold yellow"))
    _gap(console)
    _entry(console, "EXPECTED", _say(f.expected, "green"))
    _entry(console, "GOT", _say(f.got, "bold red"))
    if record.table is not None:
        _section(console, "PAGE TABLE", "as the kernel would have got it")
        page_map.render(
            record.table,
            console,
            row=f.location.row,
            column=f.location.column,
            pools=record.pools,
            rows=rows,
        )
    _gap(console)
    _entry(console, "OWNER", _say(f.owner or "not known"))
    _entry(console, "HISTORY", *([_say(h) for h in f.history] or [Text("none kept", "dim")]))
    if record.steps:
        _section(console, "LAST STEPS", "newest last")
        steps.render(
            record.steps, console, pools=record.pools, at=f.location.step, limit=last_steps
        )
    _gap(console)
    _environment(record, console, s, source)
    _gap(console)
    _entry(console, "CAUSE", _say(f.cause or "not known", "bold" if f.cause else "dim"))
    _entry(console, "FIX", _say(f.reference or "none known", "bold" if f.reference else "dim"))
    _next(console, f.next_command, source)


def _headline(record: TrapRecord, console: Console, s: Symbols) -> None:
    text = clean(record.finding.headline[:MAX_TEXT]) or f"g4debug: {clean(record.finding.check)}"
    console.print(Text(text, "bold white on red"))
    console.print(Text(s.line * console.width, "red"), no_wrap=True, overflow="crop")


def _where(at: Location, s: Symbols) -> Iterable[Text]:
    """What is known of the location; a number of -1 or an empty text is left out."""
    sep = f" {s.bullet} "

    def known(*parts: tuple[object, str]) -> str:
        return sep.join(clean(text) for value, text in parts if value not in (-1, ""))

    layer = f"layer {at.layer}" + (f" ({at.layer_kind})" if at.layer_kind else "")
    lines = (
        known(
            (at.layer, layer),
            (at.runner, f"{at.runner} model"),
            (at.forward_mode, at.forward_mode),
            (0, "CUDA-graph replay" if at.replay else "eager"),
        ),
        known(
            (at.row, f"row {at.row}"),
            (at.column, f"column {at.column}"),
            (at.request, f"request {at.request}"),
        ),
        known(
            (at.step, f"step {at.step}"),
            (at.process, at.process),
            (at.pid, f"pid {at.pid}"),
            (at.rank, f"TP rank {at.rank}"),
        ),
    )
    return [_say(line, "bold" if i == 0 else "") for i, line in enumerate(lines) if line]


def _environment(record: TrapRecord, console: Console, s: Symbols, source: str) -> None:
    room = console.width - LABEL
    packed = functools.partial(_pack, width=room, sep=f" {s.bullet} ")
    dump = [_say(record.created)] + ([_say(source)] if source else [])
    _entry(console, "DUMP", *packed(dump))
    _entry(console, "VERSIONS", *packed([_say(f"{k} {v}") for k, v in _some(record.versions)]))
    _entry(console, "POOLS", *[_pool(pool, s) for pool in record.pools[:MAX_ITEMS]])
    _entry(console, "GEOMETRY", *packed([_say(f"{k}={v}") for k, v in _some(record.geometry)]))
    _entry(console, "FIXES", *packed(_states(record.fixes)))
    _entry(console, "TRACERS", *packed(_states(record.tracers)))
    _entry(console, "FAULTS", *([_say(f) for f in record.faults[:MAX_ITEMS]] or [_none()]))
    _entry(console, "SETTINGS", *packed([_say(f"{k}={v}") for k, v in _some(record.environment)]))


def _pool(pool: Pool, s: Symbols) -> Text:
    text = _say(f"{shorten(pool.name, 12, s.more):<5} {pool.pages} pages of {pool.page_size} ")
    usage = pool.usage
    if usage is None:
        return text.append("usage not known", "dim")
    share = max(0.0, min(usage, 1.0))
    filled = round(share * BAR)
    style = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"
    text.append(s.full * filled, style).append(s.empty * (BAR - filled), "dim")
    text.append(f" {share:.0%}", style)
    return text.append(f"  {pool.used_tokens} of {pool.tokens} tokens", "dim")


def _states(values: Mapping[str, str]) -> list[Text]:
    """``name state: why``; what is off or missing stands out, it is often the reason."""
    return [
        _say(name)
        .append(" ")
        .append_text(_say(state, "yellow" if state.startswith(OFF_WORDS) else "green"))
        for name, state in _some(values)
    ] or [_none()]


def _some(values: Mapping[str, Plain]) -> list[tuple[str, str]]:
    items = [(k, str(v)) for k, v in itertools.islice(values.items(), MAX_ITEMS)]
    more = len(values) - len(items)
    return items + ([("and", f"{more} more (--json)")] if more else [])


def _pack(items: Sequence[Text], width: int, sep: str) -> list[Text]:
    """The items on as few lines as they need; only an item too long for a line is broken."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + len(sep) + item.cell_len <= width:
            lines[-1].append(sep, "dim").append_text(item)
        else:
            lines.append(item)
    return lines


def _next(console: Console, command: str, source: str) -> None:
    if not command:
        command = f"g4debug show --json {source}" if source else "g4debug list"
    # Not wrapped by us: a command broken over two lines cannot be copied. (A picture has no
    # terminal that would wrap it.)
    text = Text.assemble((f"{'NEXT':<{LABEL}}", "bold cyan"), (clean(command), "bold cyan"))
    console.print(text, soft_wrap=not console.record)


def _entry(console: Console, label: str, *lines: Text) -> None:
    """Labelled lines, wrapped with a hanging indent and without trailing spaces."""
    for line in lines:
        for part in line.wrap(console, console.width - LABEL):
            part.rstrip()
            text = Text(f"{label:<{LABEL}}", "bold cyan", end="")
            label = ""
            console.print(Text().append_text(text).append_text(part), no_wrap=True)


def _section(console: Console, label: str, note: str) -> None:
    _gap(console)
    text = Text.assemble((f"{label:<{LABEL}} ", "bold cyan"), (note, "dim"))
    console.print(text, no_wrap=True, overflow="crop")


def _gap(console: Console) -> None:
    console.print()


def _none() -> Text:
    return Text("none", "dim")


def _say(text: str, style: str = "") -> Text:
    """A text of the record: escaped, and bounded."""
    if len(text) > MAX_TEXT:
        return Text(clean(text[:MAX_TEXT]), style).append(" (cut; --json has all)", "dim")
    return Text(clean(text), style)
