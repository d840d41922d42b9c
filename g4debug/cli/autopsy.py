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
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from g4debug.cli import CliError, add_console_arguments, console_for, no_traceback

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
            with _bounded(args.core):
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


@contextlib.contextmanager
def _bounded(core: Path) -> Iterator[None]:
    """With a limit on processor time and memory of this process, where the system has such limits.

    Raises CliError if the time is over, and MemoryError.
    """

    def refuse(*args: object) -> NoReturn:
        raise CliError(
            f"{core}: reading it took more than {SECONDS} s of processor time, where some 5 s are "
            "needed; it may be damaged; try: cuda-gdb, and please report this"
        )

    usage, before = resource.getrusage(resource.RUSAGE_SELF), {}
    limits = {resource.RLIMIT_CPU: int(usage.ru_utime + usage.ru_stime) + SECONDS}
    with contextlib.suppress(OSError):  # no /proc; and a file that is not there is told by others
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + os.stat(core).st_size + ROOM
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGXCPU, refuse) if main else None
    try:
        for what, limit in limits.items():
            soft, hard = resource.getrlimit(what)
            # A limit that somebody else has set, and that is lower, stays.
            if all(other == resource.RLIM_INFINITY or other > limit for other in (soft, hard)):
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(what, (limit, hard))
                    before[what] = soft, hard
        yield
    finally:
        for what, old in before.items():
            resource.setrlimit(what, old)
        if main:
            signal.signal(signal.SIGXCPU, handler)
