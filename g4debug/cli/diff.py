"""What changed between two dumps: the last good step and the bad one, a good and a bad server.

Differences come first, equal parts are said in one line. When, where and by which process
the dumps were written is no difference. Exit code 0: no difference, 1: some, 2: a dump
cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from g4debug.cli._common import CliError, make_console, read_dump

NAME = "diff"
HELP = "what changed between two dumps; exit code 1 if anything did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A.pt", help="a dump: the good or earlier one")
    parser.add_argument("b", type=Path, metavar="B.pt", help="a dump: the bad or later one")
    parser.add_argument("--json", action="store_true", help="all differences as JSON")
    parser.add_argument("--all", action="store_true", help="all differences of every part")
    parser.add_argument("--width", type=int, help="columns (default: the terminal's, else 80)")
    parser.add_argument("--no-color", action="store_true", help="plain text (also: NO_COLOR=1)")


def run(args: argparse.Namespace) -> int:
    dumps = [(str(path), read_dump(path)) for path in (args.a, args.b)]
    from g4debug.reporters import diff
    from g4debug.reporters.compare import compare

    try:
        parts = compare(dumps[0][1], dumps[1][1])
        if args.json:
            diff.render_json(dumps, parts, sys.stdout)
        else:
            console = make_console(width=args.width, color=not args.no_color)
            diff.render(dumps, parts, console, everything=args.all)
    except BrokenPipeError:
        raise
    except Exception as e:  # a bug of ours: the evidence must stay reachable
        raise CliError(
            f"read, but cannot be compared ({type(e).__name__}: {e}); "
            "try: g4debug show --json, and please report this"
        ) from e
    return int(any(part.changes for part in parts))
