"""Open a dump and print its report.

The report says what happened, where, why, and what to do next. It works on any
machine with torch; neither a GPU nor SGLang is needed. Opening a dump runs no
code from it.

Of a folder it shows the newest incident: the dumps that the ranks of a server
wrote together. The first finding is shown in full, the others in a line each,
and what differs between the ranks. Several dumps are shown as one incident.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from g4debug.cli._common import (
    CliError,
    add_console_arguments,
    add_dump_arguments,
    add_log_argument,
    at_least,
    console_for,
    make_console,
    no_traceback,
    read_dumps,
)

if TYPE_CHECKING:
    from rich.console import Console

    from g4debug.findings.record import TrapRecord
    from g4debug.reporters.incident import View

NAME = "show"
HELP = "open a dump: what happened, where, why, and what to do next"

SVG_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dump_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the whole record as JSON")
    add_console_arguments(parser)
    parser.add_argument(
        "--svg", type=Path, metavar="OUT.svg", help="also write the report as a picture"
    )
    parser.add_argument(
        "--rows",
        type=at_least(1),
        metavar="N",
        help="show this many rows of the page table (default: 12)",
    )
    parser.add_argument("--all", action="store_true", help="show all of every table and history")
    add_log_argument(parser)


def run(args: argparse.Namespace) -> int:
    record, source, view = read_dumps(args.paths, args.log)
    with no_traceback(f"{source}: the dump was read, but cannot be rendered", "--json"):
        _render(record, view, str(source), args)
    return 0


def offline(svg: str) -> str:
    """rich's SVG without its web fonts, so that opening the picture fetches nothing."""
    return re.sub(r"@font-face\s*\{[^}]*\}\s*", "", svg)


def _render(record: TrapRecord, view: View | None, source: str, args: argparse.Namespace) -> None:
    from g4debug.reporters import incident, json, terminal

    before = incident.before(view) if view else []
    after = incident.after(view) if view else []

    def render(console: Console) -> None:
        terminal.render(
            record,
            console,
            source=source,
            rows=args.rows,
            everything=args.all,
            before=before,
            after=after,
        )

    if not args.json:
        render(console_for(args))
    elif view is not None:
        incident.render_json(view, sys.stdout)
    else:
        json.render(record, sys.stdout)
    if args.svg is not None:
        picture = make_console(
            width=args.width or SVG_WIDTH, stream=io.StringIO(), color=True, record=True
        )
        render(picture)
        try:
            args.svg.write_text(offline(picture.export_svg(title="g4debug show")), "utf-8")
        except OSError as e:
            raise CliError(f"cannot write {args.svg}: {e.strerror or e}") from e
