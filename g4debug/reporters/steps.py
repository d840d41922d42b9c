"""The last worker steps as a short table, newest last."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from g4debug.record import Pool, Step
from g4debug.reporters._text import shorten, symbols_for

DEFAULT_STEPS = 8


def render(
    steps: Sequence[Step],
    console: Console,
    *,
    pools: Sequence[Pool] = (),
    at: int = -1,
    limit: int | None = DEFAULT_STEPS,
    indent: int = 2,
) -> None:
    """Print the last ``limit`` steps (None: all). ``at``: the finding's step, marked.

    Lengths are the smallest and largest of the batch in tokens; pool use is in tokens, and a
    share of the pool where its size is known.
    """
    s = symbols_for(console.encoding)
    shown = steps if limit is None else steps[-limit:] if limit > 0 else ()
    sizes = {p.name: p.tokens for p in pools}
    head = ("step", "mode", "batch", "seq_lens", "spec_info", "full used", "swa used")
    rows = [
        (
            str(step.step),
            shorten(step.forward_mode, 16, s.more) or s.dash,
            str(len(step.seq_lens) or len(step.rids)),
            _range(step.seq_lens, s.dash),
            shorten(step.spec_info, 24, s.more) or s.dash,
            _use(step.full_used, sizes.get("full", 0), s.dash),
            _use(step.swa_used, sizes.get("swa", 0), s.dash),
        )
        for step in shown
    ]
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    # The type name is what gives way on a narrow terminal.
    spare = console.width - indent - 2 - sum(widths) - 2 * (len(widths) - 1)
    widths[4] = max(9, widths[4] + min(0, spare))
    _line(head, widths, console, " " * (indent + 2), "dim")
    if len(shown) < len(steps):
        earlier = len(steps) - len(shown)
        hint = f"{s.more} {earlier} earlier step{'s' * (earlier != 1)} (--all)"
        console.print(Text(" " * (indent + 2) + hint, "dim"), no_wrap=True, overflow="crop")
    for step, row in zip(shown, rows, strict=True):
        here = step.step == at and at >= 0
        cells = [shorten(c, w, s.more) for c, w in zip(row, widths, strict=True)]
        gutter = f"{'':<{indent}}{s.pointer if here else ' '} "
        _line(cells, widths, console, gutter, "bold red" if here else "")


def _line(
    cells: Sequence[str], widths: Sequence[int], console: Console, gutter: str, style: str
) -> None:
    left = (1, 4)  # texts; the others are numbers
    parts = [
        f"{c:<{w}}" if i in left else f"{c:>{w}}"
        for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    ]
    text = Text(gutter + "  ".join(parts).rstrip(), style)
    console.print(text, no_wrap=True, overflow="crop", crop=True)


def _range(lengths: Sequence[int], dash: str) -> str:
    if not lengths:
        return dash
    low, high = min(lengths), max(lengths)
    return f"{_short(low)}" if low == high else f"{_short(low)}..{_short(high)}"


def _use(used: int, size: int, dash: str) -> str:
    if used < 0:
        return dash
    share = f" {min(999, used * 100 // size):>3}%" if size > 0 else ""
    return f"{_short(used)}{share}"


def _short(number: int) -> str:
    text = str(number)
    return text if len(text) <= 9 else f"{text[:2]}e{len(text) - 2}"
