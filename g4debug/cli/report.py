"""Write a dump's report as one HTML page, for a phone or a ticket.

The page contains no script and fetches nothing. Without -o it is written next
to the dump, with .html in place of .pt; -o - writes it to stdout. Of a folder,
or of several dumps, it writes the incident, as show does, next to the first one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from g4debug.cli._common import CliError, add_log_argument, read_dump, with_log

NAME = "report"
HELP = "write a dump's report as one HTML page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a dump, g4debug-*.pt; or a folder of dumps; or several of them",
    )
    parser.add_argument(
        "-o", "--output", metavar="OUT.html", help="where to write it (default: next to the dump)"
    )
    add_log_argument(parser)


def run(args: argparse.Namespace) -> int:
    from g4debug.cli import _incident
    from g4debug.dumps.heads import quoted
    from g4debug.reporters import html, incident

    view = None if _incident.is_one_dump(args.paths) else _incident.load(args.paths)
    source = args.paths[0] if view is None else Path(view.first.path)
    record = read_dump(source) if view is None else view.record
    record = with_log(record, args.log, view is None)
    try:
        before = incident.before(view) if view else []
        after = incident.after(view) if view else []
        page = html.render(record, source=str(source), before=before, after=after)
    except Exception as e:  # a bug of ours: the evidence must stay reachable
        raise CliError(
            f"{source}: the dump was read, but cannot be rendered ({type(e).__name__}: {e}); "
            "try: g4debug show --json, and please report this"
        ) from e
    if args.output == "-":
        sys.stdout.buffer.write(page.encode())
        return 0
    out = source.with_suffix(".html") if args.output is None else Path(args.output)
    _write(page.encode(), out, source)
    print(quoted(out))
    return 0


def _write(page: bytes, out: Path, source: Path) -> None:
    from g4debug.dumps import errors, writing

    try:
        _refuse_odd(out, source)
        writing.write(page, out.parent, out.name)
    except OSError as e:
        raise CliError(f"cannot write {out}: {e.strerror or e}") from e
    except errors.DumpError as e:
        raise CliError(str(e)) from e


def _refuse_odd(out: Path, source: Path) -> None:
    """Raise CliError if a page may not go there, and OSError if that cannot be seen."""
    if out.is_dir() or (out.exists() and not out.is_file()):
        raise CliError(f"cannot write {out}: it is not a regular file (-o - writes to stdout)")
    if out.exists() and out.samefile(source):
        raise CliError(f"cannot write {out}: it is the dump itself")
    if not out.parent.is_dir():
        raise CliError(f"cannot write {out}: there is no directory {out.parent}")
