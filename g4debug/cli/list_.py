"""List the dumps of a folder by incident, newest first.

An incident is the dumps that the processes of one launch of a server wrote
within seconds, on all ranks and hosts. The first finding comes first. Times are
UTC. Only the heads of the files are read; a file that cannot be read is listed
with the reason. The last line is the command that shows the newest incident.

A scheduler that was killed together with its server has left a black box in
/dev/shm, or in the folder itself (G4DEBUG_BLACK_BOX=dumps). A dump is made of it
first, if the folder is where its dumps go.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from g4debug.cli import CliError, add_console_arguments, console_for, program
from g4debug.settings import DEFAULT_DUMP_DIR

NAME = "list"
HELP = "list the dumps of a folder by incident, newest first"

OLDER = "is of an older g4debug, and was removed, because this one cannot read it"
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
    add_console_arguments(parser)


def from_black_boxes(directory: Path) -> list[str]:
    """Make dumps of the black boxes of dead schedulers whose dumps go to this folder.

    Returns a line about each of which no dump can be made.
    """
    from g4debug.findings import black_box

    # The usual case is that there are none. Then torch need not be imported.
    if not any(map(partial(_left_behind, directory), black_box.everywhere(directory))):
        removed = black_box.remove_older()
        return [f"{path}: this black box {OLDER}" for path in removed]
    from g4debug.tracers.flight_recorder import box_dumps

    problems = box_dumps.collect(directory, f"g4debug {NAME}")
    return [f"{path}: no dump can be made of this black box: {why}" for path, why in problems]


def _left_behind(directory: Path, path: Path) -> bool:
    from g4debug.findings import black_box

    with black_box.opened(path) as box:
        return box is not None and box.left_behind and box.goes_to(directory)


def elsewhere(directory: Path) -> str:
    """Where dumps may be, if they are not in this folder."""
    if directory.absolute() != DEFAULT_DUMP_DIR.absolute():
        return f"Where ${VARIABLE} was not set for it, it writes to {DEFAULT_DUMP_DIR}."
    return f"If ${VARIABLE} was set for it, they are in that folder: {program()} list DIR"


def run(args: argparse.Namespace) -> int:
    from g4debug.dumps import incidents
    from g4debug.dumps.heads import quoted
    from g4debug.findings import black_box
    from g4debug.reporters import listing

    directory = args.directory
    if directory is None:
        directory = Path(os.environ.get(VARIABLE) or DEFAULT_DUMP_DIR).expanduser()
    nothing = f"There are no dumps in {quoted(directory)}."
    for problem in from_black_boxes(directory):
        print(f"g4debug: {problem}", file=sys.stderr)
    try:
        found = incidents.group(incidents.look_into(directory))
    except FileNotFoundError:
        if args.directory is not None:
            raise CliError(
                f"{quoted(directory)}: no such directory; a server writes its dumps to "
                f"${VARIABLE}, or to {DEFAULT_DUMP_DIR} if that is not set"
            ) from None
        found = []  # a server makes the folder with its first dump
        nothing = f"There are no dumps: there is no folder {quoted(directory)} yet."
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
    console = console_for(args)
    if not found:
        console.print(
            f"{nothing}\n"
            "A server writes one when a tracer finds something, or when it crashes or hangs, if it "
            f"was started with SGLANG_TRTLLM_MHA_DEBUG=1 or =watch. {elsewhere(directory)}\n"
            f"If you have the log of a server that died: {program()} triage LOG",
            soft_wrap=True,
        )
        if others := black_box.of_others():
            console.print(
                f"{black_box.FOLDER} has {others} black box{'es' * (others > 1)} of other users. "
                "If a scheduler of theirs was killed, only they can make the dump of it: run this "
                "as that user.",
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
