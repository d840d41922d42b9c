"""Write a dump's report as one HTML page, for a phone or a ticket.

The page contains no script and fetches nothing. Without -o it is written next
to the dump, with .html in place of .pt; -o - writes it to stdout. Of a folder,
or of several dumps, it writes the incident, as show does, next to the first one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from g4debug.cli import CliError, no_traceback
from g4debug.cli.show import add_dump_arguments, opened

NAME = "report"
HELP = "write a dump's report as one HTML page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", metavar="OUT.html", help="where to write it (default: next to the dump)"
    )
    add_dump_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from g4debug.dumps.heads import quoted
    from g4debug.reporters import html, incident

    record, source, view = opened(args)
    with no_traceback(f"{source}: the dump was read, but cannot be rendered"):
        before = incident.before(view) if view else []
        after = incident.after(view) if view else []
        page = html.render(record, source=str(source), before=before, after=after)
    if args.output == "-":
        sys.stdout.buffer.write(page.encode())
        return 0
    out = source.with_suffix(".html") if args.output is None else Path(args.output)
    write(page, out, source)
    print(quoted(out))
    return 0


def write(page: str, out: Path, source: Path) -> None:
    """Write a page about the dump ``source``. Raises CliError."""
    from g4debug.dumps import writing

    try:
        refuse_odd(out, source)
        writing.write(page.encode(), out.absolute().parent, out.name)
    except OSError as e:
        raise CliError(f"cannot write {out}: {e.strerror or e}") from e


def refuse_odd(out: Path, source: Path) -> None:
    """Raise CliError if a page may not go there, and OSError if that cannot be seen."""
    if out.is_dir() or (out.exists() and not out.is_file()):
        raise CliError(f"cannot write {out}: it is not a regular file")
    if out.exists() and out.samefile(source):
        raise CliError(f"cannot write {out}: it is the dump itself")
    if not out.parent.is_dir():
        raise CliError(f"cannot write {out}: there is no directory {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise CliError(f"cannot write {out}: you may not write into {out.parent}")
