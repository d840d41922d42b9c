"""List the dumps of a folder, newest first.

A file that cannot be read is listed with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from g4debug.cli._common import CliError, make_console
from g4debug.settings import DEFAULT_DUMP_DIR

if TYPE_CHECKING:
    from g4debug.reporters.listing import Entry

NAME = "list"
HELP = "list the dumps of a folder, newest first"

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
    directory = args.directory
    if directory is None:
        directory = Path(os.environ.get(VARIABLE) or DEFAULT_DUMP_DIR).expanduser()
    paths = _dumps(directory)
    entries = sorted((_entry(p) for p in paths), key=lambda e: (e.time, e.name), reverse=True)

    from g4debug.reporters import listing

    if args.json:
        listing.render_json(entries, sys.stdout)
        return 0
    console = make_console(width=args.width, color=not args.no_color)
    if not entries:
        console.print(
            f"There are no dumps in {directory}. A server that is started with "
            f"SGLANG_TRTLLM_MHA_DEBUG=1 writes its dumps to ${VARIABLE}, or to "
            f"{DEFAULT_DUMP_DIR} if that is not set.",
            soft_wrap=True,
        )
        return 0
    listing.render(entries, console)
    newest = next((e for e in entries if not e.broken), None)
    if newest is not None:
        console.print(f"\nNEXT  g4debug show {newest.path}", style="bold cyan", soft_wrap=True)
    return 0


def _dumps(directory: Path) -> list[Path]:
    from g4debug.dumps.file import SUFFIX

    try:
        return [p for p in directory.iterdir() if p.suffix == SUFFIX and p.name[0] != "."]
    except FileNotFoundError:
        raise CliError(
            f"{directory}: no such directory; a server writes its dumps to ${VARIABLE}, or to "
            f"{DEFAULT_DUMP_DIR} if that is not set"
        ) from None
    except NotADirectoryError:
        raise CliError(f"{directory}: not a directory; try: g4debug show {directory}") from None
    except (OSError, ValueError) as e:
        raise CliError(
            f"{directory}: cannot be read: {getattr(e, 'strerror', None) or e}"
        ) from None


def _entry(path: Path) -> Entry:
    from g4debug.dumps.file import DumpError
    from g4debug.dumps.reading import read
    from g4debug.reporters.listing import Entry

    size, written = _stat(path)
    try:
        record = read(path)
    except DumpError as e:
        reason = str(e).removeprefix(f"{path}: ")
        return Entry(str(path), path.name, written, "", "", size, broken=reason)
    finding = record.finding
    time = _utc(record.created) or written
    return Entry(str(path), path.name, time, finding.check, finding.headline, size)


def _stat(path: Path) -> tuple[int, str]:
    """The file's size and the time when it was written.

    They are 0 and '' for a file that has gone, or for a link to a file that does not exist.
    """
    try:
        status = path.stat()
        written = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="seconds")
    except (OSError, ValueError, OverflowError):
        return 0, ""
    return status.st_size, written


def _utc(text: str) -> str:
    """An ISO 8601 time, turned into UTC and cut to seconds; '' if ``text`` is no such time."""
    try:
        time = datetime.fromisoformat(text)
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        return ""
    return time.isoformat(timespec="seconds")
