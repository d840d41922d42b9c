"""Follow one request through a dump: from its arrival to its end.

Its prefix match, each chunk, the pages that it took and gave back with their
callers, retractions, evictions behind its window, verifies, and how it ended. The
first line says where it was when the dump was made. RID may be the beginning of
a request's id. There are no tokens and no text.

What the dump does not hold is said, and how to get it. For a running server:
g4debug doctor --pid PID --request RID.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from g4debug.cli import CliError, add_console_arguments, no_traceback, present
from g4debug.findings.names import LONGEST, LONGEST_ID, name

if TYPE_CHECKING:
    from g4debug.findings.record import TrapRecord

NAME = "trace"
HELP = "follow one request: prefix match, chunks, pages, retractions, end"
SHOWN = 8
COMPARED = 1000  # ids, of which those that are alike are looked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rid", metavar="RID", help="a request's id, or the beginning of it")
    parser.add_argument("dump", type=Path, metavar="DUMP", help="a dump, g4debug-*.pt")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    parser.add_argument("--all", action="store_true", help="a line for each chunk and page event")
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from g4debug.cli.show import read_dump

    show(read_dump(args.dump), args.rid, str(args.dump), args, everything=args.all)
    return 0


def show(
    record: TrapRecord, rid: str, source: str, args: argparse.Namespace, everything: bool = False
) -> None:
    """Print a request's way. Raises CliError if there is not just one such request."""
    from g4debug.reporters import trace, way

    with no_traceback(f"{source}: the dump was read, but its requests cannot be shown"):
        known = way.known_requests(record)
        present(trace, way.follow(record, one_of(known, rid, source), everything), args)


def one_of(known: list[str], rid: str, source: str) -> str:
    """The one request whose id is ``rid``, or begins so."""
    # Of a request that was in no step there are events only, and these have so much of its id.
    whole = rid if rid in known else rid[:LONGEST_ID]
    found = [whole] if whole in known else [one for one in known if one.startswith(rid)]
    if len(found) == 1:
        return found[0]
    if found:
        problem = f"the ids of {len(found)} requests begin with '{name(rid)}': {listed(found)}"
        raise CliError(f"{source}: {problem}; give more of it")
    # It compares each with each, character by character.
    short = {one[:LONGEST]: one for one in known[-COMPARED:]}
    near = [short[one] for one in difflib.get_close_matches(rid[:LONGEST], short, SHOWN, 0.5)]
    hint = "it knows no request" if not known else f"it knows {listed(near or known[::-1])}"
    raise CliError(f"{source}: no request '{name(rid)}'; {hint}")


def listed(rids: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(rids) - SHOWN} more" if len(rids) > SHOWN else ""
    return ", ".join(map(name, rids[:SHOWN])) + more
