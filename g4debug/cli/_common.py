"""What the subcommands share: errors of one line, the dumps that are named, and the output."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from g4debug.findings.record import TrapRecord
    from g4debug.reporters.incident import View

PROGRAM = "g4debug"
MIN_WIDTH = 40
MAX_WIDTH = 1000
LARGEST = 1 << 40  # what is more than that is a slip of the finger


class CliError(Exception):
    """Ends a command with exit code 2. Its text is printed to stderr on one line."""


def one_line(text: str) -> str:
    """``text`` on one line, with everything that could steer a terminal escaped."""
    from g4debug.reporters.text import clean

    return clean(" ".join(text.split()))


def program() -> str:
    """How g4debug can be called again, for the commands that we print.

    ``g4debug`` if that is found, or else as this process was started: by a path, or by ``python
    -m``.
    """
    from g4debug.dumps.heads import quoted

    if shutil.which(PROGRAM):
        return PROGRAM
    started = Path(sys.argv[0])
    if started.name == PROGRAM and started.is_file() and os.access(started, os.X_OK):
        return quoted(sys.argv[0])
    return f"{quoted(sys.executable)} -m {PROGRAM}"


def list_command(path: Path) -> str:
    """The command that lists the dumps beside a file, or those of the default folder."""
    from g4debug.dumps.heads import quoted

    return f"{program()} list" + (f" {quoted(path.parent)}" if path.parent.is_dir() else "")


def add_dump_arguments(parser: argparse.ArgumentParser) -> None:
    """The dumps that ``read_dumps`` takes."""
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a dump, g4debug-*.pt; or a folder of dumps; or several of them",
    )


def read_dumps(paths: list[Path], log: Path | None) -> tuple[TrapRecord, Path, View | None]:
    """The record to show, its dump, and the incident if the paths are more than one dump.

    log: the server's log, which belongs to one dump. Raises CliError if nothing can be shown.
    """
    if is_one_dump(paths):
        return with_log(read_dump(paths[0]), log), paths[0], None
    from g4debug.cli import _incident
    from g4debug.dumps.errors import DumpError

    try:
        view = _incident.load(paths, [p for p in paths if not is_one_dump([p])], list_command)
    except DumpError as e:
        raise CliError(str(e)) from e
    if log is not None:
        raise CliError("--log belongs to one dump, and these are several: name one of them")
    return view.record, view.first.path, view


def is_one_dump(paths: list[Path]) -> bool:
    """True if ``paths`` is one path, and not a folder. It need not exist."""
    try:
        return len(paths) == 1 and not paths[0].is_dir()
    except (OSError, ValueError):  # whoever opens it says what is wrong
        return len(paths) == 1


def read_dump(path: Path) -> TrapRecord:
    """The record of a dump. Raises CliError, which says why, if the dump cannot be read."""
    from g4debug.dumps.errors import DumpError
    from g4debug.dumps.reading import read

    try:
        return read(path)
    except DumpError as e:
        what = str(e)
        if "try: " not in what:
            what += f"; try: {list_command(path)}"
        raise CliError(what) from e


def add_console_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``make_console`` is told by the user."""
    parser.add_argument(
        "--width",
        type=at_least(MIN_WIDTH),
        metavar="N",
        help="print this many columns (default: the terminal's, or 80)",
    )
    parser.add_argument(
        "--no-color", action="store_true", help="print without colour (NO_COLOR=1 does so, too)"
    )


def at_least(low: int) -> Callable[[str], int]:
    """A type of argparse's: a whole number that is ``low`` or more."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= LARGEST:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {low}")
        return value

    return number


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log",
        type=Path,
        metavar="LOG",
        help="the server's log: what CUDA printed there about a device-side assert is put in",
    )


def with_log(record: TrapRecord, path: Path | None) -> TrapRecord:
    """The record with the assertions that the end of a log has. path: None for no log.

    Raises CliError if the log does not belong to it.
    """
    if path is None:
        return record
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


@contextmanager
def no_traceback(what: str, hint: str = "g4debug show --json") -> Iterator[None]:
    """Turn a bug of a reporter into a CliError: the evidence must stay reachable."""
    try:
        yield
    except (OSError, CliError):  # OSError: the output cannot be written
        raise
    except Exception as e:
        problem = f"{type(e).__name__}: {e}"
        raise CliError(f"{what} ({problem}); try: {hint}, and please report this") from e


def present(reporter: Any, found: Any, args: argparse.Namespace) -> None:
    """Print what was found as the user asked for it: by ``render`` or by ``render_json``."""
    if args.json:
        reporter.render_json(found, sys.stdout)
    else:
        reporter.render(found, console_for(args))


def console_for(args: argparse.Namespace) -> Console:
    return make_console(width=args.width, color=not args.no_color)


def make_console(
    *,
    width: int | None = None,
    color: bool = True,
    stream: IO[str] | None = None,
    record: bool = False,
) -> Console:
    """A console on ``stream`` (default: stdout), ``width`` columns wide (default: its own width).

    It writes colours only if the stream is a terminal and ``color`` is on, and else not one ANSI
    code. NO_COLOR counts as ``color=False``. ``record=True`` is for ``export_svg`` and always has
    colours.
    """
    from rich.console import Console

    class QuietPipe(Console):
        def on_broken_pipe(self) -> None:  # rich would print and exit with 1
            raise BrokenPipeError

    plain = not record and (not color or bool(os.environ.get("NO_COLOR")))
    if width is not None:
        width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    console = QuietPipe(
        file=stream or sys.stdout,
        width=width,
        color_system="truecolor" if record else None if plain else "auto",
        force_terminal=True if record else None,
        record=record,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    if width is None and console.width < MIN_WIDTH:
        console.width = MIN_WIDTH
    return console
