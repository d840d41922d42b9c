"""Open a dump and print its report.

The report says what happened, where, why, and what to do next. It needs neither
SGLang nor torch nor a GPU. Opening a dump runs no code from it.

Of a folder it shows the newest incident: the dumps that the ranks of a server
wrote together. The first finding is shown in full, the others in a line each,
and what differs between the ranks. Several dumps are shown as one incident.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from g4debug.cli import (
    CliError,
    add_console_arguments,
    at_least,
    console_for,
    make_console,
    no_traceback,
    program,
)
from g4debug.dumps.errors import DumpError
from g4debug.dumps.heads import quoted

if TYPE_CHECKING:
    from rich.console import Console

    from g4debug.findings.record import TrapRecord
    from g4debug.reporters.incident import View

NAME = "show"
HELP = "open a dump: what happened, where, why, and what to do next"

SVG_WIDTH = 100


def add_dump_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that ``opened`` takes."""
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a dump, g4debug-*.pt; or a folder of dumps; or several of them",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="LOG",
        help="the server's log: what CUDA printed there about a device-side assert is put in",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    add_dump_arguments(parser)


def run(args: argparse.Namespace) -> int:
    record, source, view = opened(args)
    with no_traceback(f"{source}: the dump was read, but cannot be rendered", "--json"):
        _render(record, view, str(source), args)
    return 0


def opened(args: argparse.Namespace) -> tuple[TrapRecord, Path, View | None]:
    """The record to show, its dump, and the incident if more than one dump is named.

    Raises CliError or DumpError if nothing can be shown.
    """
    folders = [path for path in args.paths if _is_folder(path)]
    if len(args.paths) == 1 and not folders:
        record = read_dump(args.paths[0])
        return record if args.log is None else _with_log(record, args.log), args.paths[0], None
    from g4debug.cli import _incident, list_

    for folder in folders:
        for problem in list_.from_black_boxes(folder):
            print(f"g4debug: {problem}", file=sys.stderr)
    view = _incident.load(args.paths, folders, list_command)
    if args.log is not None:
        raise CliError("--log belongs to one dump, and these are several: name one of them")
    return view.record, view.first.path, view


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # opening it gives the reason
        return False


def read_dump(path: Path) -> TrapRecord:
    """The record of a dump. Raises DumpError, which also says what to try."""
    from g4debug.dumps.reading import read

    try:
        return read(path)
    except DumpError as e:
        if "try: " in str(e):
            raise
        raise DumpError(f"{e}; try: {list_command(path)}") from e


def list_command(path: Path) -> str:
    """The command that lists the dumps beside a file, or in the default folder."""
    beside = f" {quoted(path.parent)}" if os.path.isdir(path.parent) else ""
    return f"{program()} list{beside}"


def _with_log(record: TrapRecord, path: Path) -> TrapRecord:
    """The record with the assertions that the end of a log has.

    Raises CliError if the log does not belong to it.
    """
    finding = record.finding
    if finding.kind != "device-assert":
        raise CliError(
            f"--log is for a dump of a device-side assert, and the finding of this one is "
            f"{finding.check}: {finding.kind}; leave it out"
        )
    from g4debug.tracers.flight_recorder import assert_evidence
    from g4debug.tracers.flight_recorder.stderr_capture import MOST

    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST))
            return assert_evidence.with_log(record, file.read(MOST).decode(errors="replace"))
    except OSError as e:
        raise CliError(f"cannot read {path}: {e.strerror or e}") from e
    except ValueError as e:
        raise CliError(f"{path}: {e}") from e


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
