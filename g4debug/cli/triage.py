"""Find the first cause in a server's log, and print the entry that explains it.

WHAT is a log (- or nothing: standard input, so kubectl logs POD | g4debug triage
works), the number of an entry, or words of a log: a line, a piece of one, or a
finding. A log is read as a stream, of
any size. What counts is what happened first on the rank that failed first, not
the last error. The entry is printed with the facts of this log, the state of its
fixes, the dumps and CUDA core dumps of that time, and the next command. What it
says does not depend on the SGLang of this machine: SGLang's release is taken from
the log. --here says that the log is of the SGLang that is installed here.

Where no entry fits it says so. --bundle writes what a report of a bug needs into
a tar file: versions, the status of servers that run here, the heads of dumps,
their autopsies, the log around the time. It says what it will write, and asks
first. Lines with requests, secrets and the tape are left out. That is a sieve:
look at the file before you send it.

The exit code is 0 if an entry was found, or the cause is known and not g4debug's
matter, or nothing in the log ends a server; 1 if what ended it is not known, or it
is no log of SGLang, or no entry has the words.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from g4debug.cli import CliError, add_console_arguments, console_for, no_traceback, one_line
from g4debug.settings import DEFAULT_DUMP_DIR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from g4debug.reporters.fixes import Row
    from g4debug.triage.reading import Reading
    from g4debug.triage.verdict import FixSaid, Verdict

NAME = "triage"
HELP = "find the first cause in a server's log, and what to do about it"

VARIABLE = "SGLANG_TRTLLM_MHA_DEBUG_DIR"
UNKNOWN = 1
TERMINAL = "/dev/tty"  # of whoever typed the command, also where a log comes in a pipe
_FILE = re.compile(r"\.[a-z0-9]{1,4}$")  # how a file's name ends, and no word of a log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        default="-",
        metavar="WHAT",
        help="a log, an entry's number, or words of a log",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "--dumps",
        type=Path,
        metavar="DIR",
        help=f"the folder of the dumps (default: the log's, ${VARIABLE}, or {DEFAULT_DUMP_DIR})",
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="OUT.tar", help="also write what a report of a bug needs"
    )
    parser.add_argument(
        "--here", action="store_true", help="the log is of the SGLang that is installed here"
    )
    parser.add_argument(
        "--case", action="store_true", help="print the long story of an entry's number"
    )
    parser.add_argument("--tape", action="store_true", help="put whole dumps into it, too")
    parser.add_argument("--yes", action="store_true", help="write it without asking")
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.bundle is None and (args.tape or args.yes):
        raise CliError("--tape and --yes belong to --bundle OUT.tar")
    if args.case:
        print(story(args.what), end="")
        return 0
    if args.bundle is not None and args.what != "-" and not _is_file(args.what):
        raise CliError("--bundle needs a log: a file, or - for standard input")
    with contextlib.ExitStack() as opened:
        if args.bundle is not None and args.what == "-":  # it is read a second time
            args.what = str(opened.enter_context(_spooled()))
        return _run(args)


def story(what: str) -> str:
    """The long story of an entry. Raises CliError if there is none."""
    from g4debug.triage.entry import entries

    if not what.isascii() or not what.isdigit() or int(what) not in entries():
        raise CliError(f"--case needs the number of an entry, 1 to {max(entries())}; got {what!r}")
    try:
        return entries()[int(what)].story
    except OSError as e:
        raise CliError(f"the case of entry {what} cannot be read: {e.strerror}") from e


@contextlib.contextmanager
def _spooled() -> Iterator[Path]:
    """Standard input in a file that only we can read, for as long as it is needed."""
    if sys.stdin is None or sys.stdin.isatty():
        raise CliError("expected a log: g4debug triage LOG, or pipe one in; try --help")
    with tempfile.NamedTemporaryFile(prefix="g4debug-log-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def _run(args: argparse.Namespace) -> int:
    from g4debug.reporters import triage

    with no_traceback("the log was read, but the verdict cannot be rendered", "TRIAGE.md"):
        found, note = looked_up(args)
        if args.json:
            triage.render_json(found, sys.stdout)
        else:
            if note:
                print(f"g4debug: {note}", file=sys.stderr)
            triage.render(found, console_for(args))
    if args.bundle is not None:
        bundled(found, args)
    missing = found.asked and found.state == "nothing"
    return UNKNOWN if found.state in ("unknown", "foreign") or missing else 0


def looked_up(args: argparse.Namespace) -> tuple[Verdict, str]:
    """The verdict on what was asked for, and a note for the user. Raises CliError."""
    from g4debug.hooking import targets
    from g4debug.triage import lookup, reading, verdict
    from g4debug.triage.entry import entries

    what = args.what
    if what.isascii() and what.isdigit():
        if int(what) not in entries():
            raise CliError(f"there is no entry {what}; expected 1 to {max(entries())}, or a log")
        return environment(verdict.of_entry(int(what)), (), args.dumps), ""
    note, installed = "", ""
    if args.here:
        installed = str(targets.sglang_version() or "")
        if not installed:
            raise CliError("--here: no SGLang is installed in this Python")
    if what == "-" or _is_file(what):
        found = read_log(what, installed)
    elif " " not in what and (os.sep in what or _FILE.search(what)):
        raise CliError(
            f"{what}: no such file; expected a log, the number of an entry, or words of a log"
        )
    else:
        lines = (line.encode("utf-8", "replace") for line in what.splitlines())
        found = reading.of(lines, single=True, installed=installed)
        said = verdict.of_words(verdict.of(found), lookup.look_up(what))
        note = "there is no file of that name, so it was looked up as words of a log"
        return environment(said, (), args.dumps), note
    return environment(verdict.of(found), found.chosen.dumps, args.dumps), note


def bundled(found: Verdict, args: argparse.Namespace) -> None:
    """Say what the bundle will have, ask, and write it. Raises CliError, or OSError."""
    import io

    from g4debug.reporters import triage
    from g4debug.triage import bundle

    said = io.StringIO()
    triage.render_json(bundle.sieved(found), said)
    middle = found.first.line if found.first is not None else max(1, found.read)
    pieces = bundle.pieces(said.getvalue(), Path(args.what), middle, found.dumps, args.tape)
    print(f"g4debug: {args.bundle} will have:", file=sys.stderr)
    for piece in pieces:
        print(
            f"  {one_line(piece.name)}, {len(piece.data):,} bytes: {piece.about}", file=sys.stderr
        )
    print(
        "  The log went through a sieve: look at the file before you send it, because a message "
        "may quote a client.",
        file=sys.stderr,
    )
    if not args.yes and not _agrees():
        print("g4debug: nothing was written", file=sys.stderr)
        return
    bundle.write(pieces, args.bundle)
    print(f"g4debug: wrote {args.bundle}", file=sys.stderr)


def _agrees() -> bool:
    """Ask whoever sits there: on standard input, or on their terminal if that is the log.

    Raises CliError if nobody can be asked.
    """
    with contextlib.ExitStack() as opened:
        asked = sys.stdin
        if asked is None or not asked.isatty():
            try:
                asked = opened.enter_context(open(TERMINAL, encoding="utf-8", errors="replace"))
                alone = os.tcgetpgrp(asked.fileno()) != os.getpgrp()  # a job in the background
            except OSError:
                alone = True
            if alone:
                raise CliError("nothing was written: nobody can be asked here; --yes writes it")
        print("Write it? [y/N] ", end="", file=sys.stderr, flush=True)
        return asked.readline().strip().lower() in ("y", "yes")


def _is_file(what: str) -> bool:
    try:
        return Path(what).exists()
    except (OSError, ValueError):
        return False


def read_log(what: str, installed: str = "") -> Reading:
    """Read a file, or standard input for '-'. Raises CliError if that cannot be done."""
    if what == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise CliError("expected a log: g4debug triage LOG, or pipe one in; try --help")
        return _read(sys.stdin.buffer, "standard input", installed)
    try:
        with Path(what).open("rb") as file:
            return _read(file, what, installed)
    except OSError as e:
        raise CliError(f"cannot read {what}: {e.strerror or e}") from e


def _read(stream: BinaryIO, what: str, installed: str) -> Reading:
    from g4debug.triage import lines, reading

    try:
        return reading.read(stream, installed)
    except lines.CompressedError as e:
        raise CliError(f"cannot read {what}: {e}") from e
    except (EOFError, zlib.error) as e:
        raise CliError(
            f"cannot read {what}: its gzip is damaged ({e}); zcat LOG | g4debug triage reads what "
            "is whole"
        ) from e


def environment(found: Verdict, named: tuple[str, ...] | list[str], given: Path | None) -> Verdict:
    """The verdict with the state of the entry's fixes, and the dumps and cores of that time."""
    from dataclasses import replace

    from g4debug.triage import verdict

    folder = given or Path(os.environ.get(VARIABLE) or DEFAULT_DUMP_DIR).expanduser()
    if given is None and found.server.dumps and Path(found.server.dumps).is_dir():
        folder = Path(found.server.dumps)
    fixes = tuple(fix_said(name, found) for name in found.entry.fixes) if found.entry else ()
    try:
        dumps = verdict.dumps_of(found.first, named, folder)
        cores = verdict.cores_of(found.first, folder)
    except (OSError, ValueError) as e:
        if given is not None:
            raise CliError(f"{given}: cannot be read: {getattr(e, 'strerror', None) or e}") from e
        dumps, cores = (), ()  # there is no folder until a server writes its first dump
    with contextlib.suppress(OSError):
        cores += verdict.cores_of(found.first, verdict.SGLANGS_CORES)
    command = found.next_command
    if dumps and not named and found.state in ("entry", "unknown"):
        command = verdict.typed(verdict.show(dumps[0].path))
    here = {dump.path.name for dump in dumps}
    absent = tuple(x for x in named if not _is_file(x) and Path(x).name not in here)
    return replace(
        found, fixes=fixes, dumps=dumps, cores=cores, next_command=command, absent=absent
    )


def fix_said(name: str, found: Verdict) -> FixSaid:
    """The state of a fix for the server of the log, as far as the log says its release."""
    from g4debug import discovery
    from g4debug.hooking import targets
    from g4debug.triage.verdict import FixSaid

    server = found.server
    if name in server.fixes:
        return FixSaid(name, "in force", "g4debug's line at start says so")
    fix = discovery.load("fix", name)
    for_it = f"it is for SGLang {fix.needs}"
    if server.installed:
        states = {row.id: row for row in _rows()}
        row = states.get(name)
        if row is None or row.state == "unknown":
            return FixSaid(name, "unknown", for_it)
        said = {"applied": "applies", "not-needed": "not needed"}.get(row.state, row.state)
        if server.armed and said == "applies":
            said = "off"
        return FixSaid(name, said, f"on SGLang {server.installed}, here: {row.why}")
    try:
        from packaging.version import Version

        releases = [Version(server.release)] if server.release else []
        releases = releases or [Version(f"0.5.{n}") for n in server.minors]
        fits = [targets.matches(fix.needs, one) for one in releases]
    except (ImportError, ValueError):
        return FixSaid(name, "unknown", for_it)
    if not any(fits):
        return FixSaid(name, "not for it", for_it)
    if server.armed:
        return FixSaid(name, "off", "the line of g4debug at start does not name it")
    if not server.release:
        return FixSaid(name, "by release", f"{for_it}; the log does not say which one it was")
    return FixSaid(name, "applies", f"{for_it}, as the one of the log")


def _rows() -> list[Row]:
    from g4debug.cli import fixes

    try:
        return list(fixes.rows(os.environ))
    except CliError:
        return []  # g4debug fixes says what is wrong with the environment
