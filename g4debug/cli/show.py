"""Open a dump and print its report.

The report says what happened, where, why, and what to do next. It works on any
machine with torch; neither a GPU nor SGLang is needed. Opening a dump runs no
code from it.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from g4debug.cli._common import CliError, make_console, read_dump

if TYPE_CHECKING:
    from g4debug.findings.record import TrapRecord

NAME = "show"
HELP = "open a dump: what happened, where, why, and what to do next"

SVG_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a dump, g4debug-*.pt")
    parser.add_argument("--json", action="store_true", help="print the whole record as JSON")
    parser.add_argument(
        "--width", type=int, help="print this many columns (default: the terminal's, or 80)"
    )
    parser.add_argument(
        "--no-color", action="store_true", help="print without colour (NO_COLOR=1 does so, too)"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="OUT.svg", help="also write the report as a picture"
    )
    parser.add_argument(
        "--rows", type=int, help="show this many rows of the page table (default: 12)"
    )
    parser.add_argument("--all", action="store_true", help="show all of every table and history")


def run(args: argparse.Namespace) -> int:
    record = read_dump(args.path)
    try:
        _render(record, args)
    except (OSError, CliError):  # OSError: the output cannot be written
        raise
    except Exception as e:  # a bug of ours: the evidence must stay reachable
        raise CliError(
            f"{args.path}: the dump was read, but cannot be rendered ({type(e).__name__}: {e}); "
            "try: --json, and please report this"
        ) from e
    return 0


def offline(svg: str) -> str:
    """rich's SVG without its web fonts, so that opening the picture fetches nothing."""
    return re.sub(r"@font-face\s*\{[^}]*\}\s*", "", svg)


def _render(record: TrapRecord, args: argparse.Namespace) -> None:
    from g4debug.reporters import json, page_map, terminal

    rows = None if args.all else page_map.DEFAULT_ROWS if args.rows is None else max(1, args.rows)
    if args.json:
        json.render(record, sys.stdout)
    else:
        console = make_console(width=args.width, color=not args.no_color)
        terminal.render(record, console, source=str(args.path), rows=rows, everything=args.all)
    if args.svg is not None:
        picture = make_console(
            width=args.width or SVG_WIDTH, stream=io.StringIO(), color=True, record=True
        )
        terminal.render(record, picture, source=str(args.path), rows=rows, everything=args.all)
        try:
            args.svg.write_text(offline(picture.export_svg(title="g4debug show")), "utf-8")
        except OSError as e:
            raise CliError(f"cannot write {args.svg}: {e.strerror or e}") from e
