"""List the dumps of a folder by incident, newest first.

An incident is the dumps that the processes of one launch of a server wrote
within seconds, on all ranks and hosts. The first finding comes first. Times are
UTC. Only the heads of the files are read; a file that cannot be read is listed
with the reason. The last line is the command that shows the newest incident.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from g4debug.cli._common import CliError, make_console, program
from g4debug.settings import DEFAULT_DUMP_DIR

NAME = "list"
HELP = "list the dumps of a folder by incident, newest first"

VARIABLE = "SGLANG_TRTLLM_MHA_DEBUG_DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=f"the folder (default: ${VARIABLE}, or {DEFAULT_DUMP_DIR} if that is not set)",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument(
        "--width", type=int, help="print this many columns (default: the terminal's, or 80)"
    )
    parser.add_argument(
        "--no-color", action="store_true", help="print without colour (NO_COLOR=1 does so, too)"
    )


def run(args: argparse.Namespace) -> int:
    from g4debug.dumps import incidents
    from g4debug.dumps.file import quoted
    from g4debug.reporters import listing

    directory = args.directory
    if directory is None:
        directory = Path(os.environ.get(VARIABLE) or DEFAULT_DUMP_DIR).expanduser()
    try:
        found = incidents.group(incidents.look_into(directory))
    except FileNotFoundError:
        raise CliError(
            f"{quoted(directory)}: no such directory; a server writes its dumps to ${VARIABLE}, "
            f"or to {DEFAULT_DUMP_DIR} if that is not set"
        ) from None
    except NotADirectoryError:
        raise CliError(
            f"{quoted(directory)}: not a directory; try: g4debug show {quoted(directory)}"
        ) from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise CliError(f"{quoted(directory)}: cannot be read: {reason}") from None

    if args.json:
        listing.render_json(found, sys.stdout)
        return 0
    console = make_console(width=args.width, color=not args.no_color)
    if not found:
        console.print(
            f"There are no dumps in {quoted(directory)}. A server that is started with "
            f"SGLANG_TRTLLM_MHA_DEBUG=1 writes its dumps to ${VARIABLE}, or to "
            f"{DEFAULT_DUMP_DIR} if that is not set.",
            soft_wrap=True,
        )
        return 0
    listing.render(found, console, program=program())
    newest = next((i for i in found if any(not d.broken for d in i.dumps)), None)
    if newest is not None:
        if len(newest.dumps) <= listing.MANY:
            command = listing.show_command(newest, program())
        else:
            command = f"{program()} show {quoted(directory)}"
        console.print(f"\nNEXT  {command}", style="bold cyan", soft_wrap=True)
    return 0
