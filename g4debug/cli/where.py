"""Say what an address is, by the memory map of a dump.

An address comes from a log: the Xid of an MMU fault in dmesg, compute-sanitizer,
cuda-gdb, SGLang. Give it in hex; or give a whole log, or - for stdin, and every
address in it that somebody complains about, or that the map knows, is told.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from g4debug.cli import CliError, add_console_arguments, console_for

NAME = "where"
HELP = "say what an address in a log is: which buffer, layer and page"
HEX = re.compile(r"(?:0x)?([0-9a-f]{1,8}_?[0-9a-f]{1,16})", re.I)
MOST = 256 << 20  # bytes of a log
LONGEST = 64 << 10  # bytes of a line; a longer one is read in pieces
AGAIN = 512  # bytes at the end of a piece that are read again: they tell what the next words mean
DIGITS = b"0123456789abcdefABCDEFxX_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", metavar="ADDRESS", help="an address in hex, or a log file, or - for stdin"
    )
    parser.add_argument("dump", type=Path, metavar="DUMP", help="the dump of the process")
    parser.add_argument(
        "--all", action="store_true", help="tell up to 100,000 addresses of a log, not 1,000"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from g4debug.autopsy import logs
    from g4debug.cli.show import read_dump
    from g4debug.reporters import json, where

    record = read_dump(args.dump)
    memory = record.memory
    if memory is None:
        raise CliError(
            f"{args.dump}: it has no memory map; it is of an older g4debug, or of a process that "
            "died before its pools were made"
        )
    more = 0
    given = HEX.fullmatch(args.what)
    if given and not Path(args.what).exists():
        found = [logs.found(int(given[1].replace("_", ""), 16), memory)]
    else:
        most = logs.MOST if args.all else logs.FIRST
        found, more = logs.addresses(_lines(args.what), memory, most, record.finding.location.pid)
    if args.json:
        json.write({"found": found, "left_out": more}, sys.stdout)
    else:
        where.render(found, more, memory, console_for(args))
    return 0


def _lines(name: str) -> Iterator[str]:
    """The lines of a log, or of stdin. Raises CliError if it cannot be read, or is too long."""
    if name == "-":
        yield from _bounded(sys.stdin.buffer, "stdin")
        return
    try:
        with Path(name).open("rb") as file:
            yield from _bounded(file, name)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise CliError(f"{name}: neither an address in hex nor a log: {reason}") from e


def _bounded(file: BinaryIO, name: str) -> Iterator[str]:
    room, rest = MOST, b""
    while line := file.readline(LONGEST):
        room -= len(line)
        if room < 0:
            raise CliError(f"{name}: more than {MOST >> 20} MiB; give the end of it")
        piece, rest = rest + line, b""
        if len(line) == LONGEST and not line.endswith(b"\n"):
            # Half of an address would be another one, so the piece ends in front of it.
            half = len(piece) - len(piece.rstrip(DIGITS))
            end = len(piece) - half if half < AGAIN else len(piece)
            piece, rest = piece[:end], piece[max(0, end - AGAIN) :]
        yield piece.decode(errors="replace")
    yield rest.decode(errors="replace")
