"""Show what differs between two dumps.

A good server may have written one of them and a bad server the other, for
instance. Differences come first; equal parts are named in one line. When, where
and by which process a dump was written does not count. The exit code is 0 if
nothing differs, 1 if something does, and 2 if a dump cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from g4debug.cli import add_console_arguments, console_for, no_traceback
from g4debug.cli.show import read_dump

NAME = "diff"
HELP = "show what differs between two dumps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A.pt", help="the good or the earlier dump")
    parser.add_argument("b", type=Path, metavar="B.pt", help="the bad or the later dump")
    parser.add_argument("--json", action="store_true", help="print all differences as JSON")
    parser.add_argument("--all", action="store_true", help="show all differences of every part")
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    dumps = [(str(path), read_dump(path)) for path in (args.a, args.b)]
    from g4debug.reporters import diff
    from g4debug.reporters.compare import compare

    with no_traceback("the dumps were read, but cannot be compared"):
        parts = compare(dumps[0][1], dumps[1][1])
        if args.json:
            diff.render_json(dumps, parts, sys.stdout)
        else:
            diff.render(dumps, parts, console_for(args), everything=args.all)
    return int(any(part.changes for part in parts))
