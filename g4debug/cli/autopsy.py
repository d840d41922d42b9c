"""Read a CUDA core dump: which kernel faulted, on which page, of which request.

The CUDA driver writes a core dump where a kernel faults, if it was told to. It
has the address that faulted, as a number. With the dump of the same process,
which has a map of its memory, the number becomes a layer, K or V, a page, a row
and a request, or the proof that it was no KV page at all. It needs no GPU, no
CUDA and no cuda-gdb.

--write puts the autopsy into the dump, so that show and report print it and the
core dump may go.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from g4debug.cli import CliError, add_console_arguments, console_for, no_traceback
from g4debug.cli._bound import bounded

NAME = "autopsy"
HELP = "read a CUDA core dump: which kernel, page, row and request"
# A core dump may be of anybody. One of a whole H100 takes some 5 s, and a few hundred MB.
SECONDS = 120  # of processor time
ROOM = 4 << 30  # bytes of memory, beside the file, which is mapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("core", type=Path, metavar="CORE", help="a CUDA core dump")
    parser.add_argument(
        "dump", type=Path, nargs="?", metavar="DUMP", help="the g4debug dump of the same process"
    )
    parser.add_argument("--json", action="store_true", help="print the autopsy as JSON")
    parser.add_argument("--write", action="store_true", help="put the autopsy into DUMP")
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from g4debug.autopsy import examine
    from g4debug.autopsy.errors import CoreError
    from g4debug.cli.show import read_dump
    from g4debug.dumps import writing
    from g4debug.reporters import autopsy, json
    from g4debug.tracers.flight_recorder.with_core import with_autopsy

    if args.write and args.dump is None:
        raise CliError("--write needs the DUMP that the autopsy is put into")
    record = None if args.dump is None else read_dump(args.dump)
    with no_traceback(f"{args.core}: it was opened, but cannot be read", "cuda-gdb"):
        try:
            with bounded(_too_long(args.core), SECONDS, _size(args.core) + ROOM):
                found = examine.examine(args.core, record)
        except CoreError as e:
            raise CliError(f"{args.core}: {e}") from e
    if args.write and record is not None:
        whole = with_autopsy(record, found)
        writing.write(writing.encode(whole), args.dump.absolute().parent, args.dump.name)
    if args.json:
        json.write(found, sys.stdout)
    else:
        autopsy.render(found, console_for(args))
    return 0


def _size(core: Path) -> int:
    """Bytes of the file, which is mapped; 0 if there is none, which others tell."""
    with contextlib.suppress(OSError):
        return os.stat(core).st_size
    return 0


def _too_long(core: Path) -> str:
    return (
        f"{core}: reading it took more than {SECONDS} s of processor time, where some 5 s are "
        "needed; it may be damaged; try: cuda-gdb, and please report this"
    )
