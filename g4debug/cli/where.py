"""Say what an address is, by the memory map of a dump.

An address comes from a log: the Xid of an MMU fault in dmesg, compute-sanitizer,
cuda-gdb, SGLang. Give it in hex; or give a whole log, or - for stdin, and every
address in it that somebody complains about, or that the map knows, is told.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from g4debug.cli import CliError, add_console_arguments, console_for, no_traceback
from g4debug.cli._bound import bounded
from g4debug.dumps.heads import open_at_once

if TYPE_CHECKING:
    from g4debug.findings.memory_map import MemoryMap

NAME = "where"
HELP = "say what an address in a log is: which buffer, layer and page"
HEX = re.compile(r"(?:0x)?([0-9a-f]+(?:_[0-9a-f]+)?)", re.I)
MOST = 256 << 20  # bytes of a log
SECONDS = 300  # of processor time for a log; one of 256 MiB takes some 60
ROOM = 2 << 30  # bytes of memory; 100,000 lines that are told may take 400 MB
TOLD = 10.0  # seconds between two lines that say how much is read
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
    if HEX.fullmatch(args.what) and not os.path.exists(args.what):
        found = [logs.found(_address(args.what, memory), memory)]
    else:
        most = logs.MOST if args.all else logs.FIRST
        pid = record.finding.location.pid
        with (
            no_traceback(f"{args.what}: its addresses cannot be told", "the part around the fault"),
            bounded(_too_long(args.what), SECONDS, ROOM),
        ):
            found, more = logs.addresses(_lines(args.what), memory, most, pid)
    if args.json:
        json.write({"found": found, "left_out": more}, sys.stdout)
    else:
        where.render(found, more, memory, console_for(args))
    return 0


def _address(text: str, memory: MemoryMap) -> int:
    """The address that a user typed. Raises CliError if it can be none, or one of two."""
    from g4debug.autopsy import logs

    digits = text.lower().removeprefix("0x").replace("_", "")
    address = int(digits, 16)
    if address >= logs.HIGHEST:
        hint = "; if it is decimal, give it as hex: printf '%#x' NUMBER" if text.isdecimal() else ""
        raise CliError(
            f"{text}: read as hex it has {address.bit_length()} bits, and an address has at most "
            f"{(logs.HIGHEST - 1).bit_length()}{hint}"
        )
    if text.isdecimal() and int(text) >= logs.LOWEST:
        raise CliError(
            f"{text}: it may be hex or decimal; give 0x{text} if it is hex, and {int(text):#x} if "
            "it is decimal"
        )
    if address < logs.LOWEST and not memory.at(address):
        begin = min((r.start for r in memory.ranges), default=0)
        raise CliError(
            f"{text}: no log has this name, and {address:#x} is below all buffers of the dump, of "
            f"which the first begins at {begin:#x}: a null pointer with an offset, or no address"
        )
    return address


def _too_long(name: str) -> str:
    return (
        f"{name}: looking for its addresses took more than {SECONDS} s of processor time, where "
        f"some 60 are needed for {MOST >> 20} MiB; give the part around the fault"
    )


def _lines(name: str) -> Iterator[str]:
    """The lines of a log, or of stdin. Raises CliError if it cannot be read, or is too long."""
    if name == "-":
        if sys.stdin is None:
            raise CliError("standard input is closed; pipe a log in, or give a file")
        yield from _pieces(sys.stdin.buffer, "stdin")
        return
    try:
        # Without waiting for a FIFO's writer; what one writes is then waited for, as of stdin.
        with open(name, "rb", opener=open_at_once) as file:
            os.set_blocking(file.fileno(), True)
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) and not file.peek(1):
                raise CliError(f"{name}: a FIFO that nobody writes to; give a log, or - for stdin")
            yield from _pieces(file, name)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise CliError(f"{name}: neither an address in hex nor a log: {reason}") from e


def _pieces(packed: BinaryIO, name: str) -> Iterator[str]:
    """The pieces of a log, which may be in UTF-16, or of gzip as logrotate leaves it."""
    from g4debug.triage import lines

    try:
        yield from _cut(lines.opened(packed, "g4debug where - DUMP"), name)
    except lines.CompressedError as e:
        raise CliError(f"{name}: {e}") from e
    except (EOFError, zlib.error) as e:
        raise CliError(
            f"{name}: its gzip is damaged ({e}); zcat LOG | g4debug where - DUMP reads what is "
            "whole"
        ) from e


def _cut(file: BinaryIO, name: str) -> Iterator[str]:
    room, rest, told = MOST, b"", time.monotonic()
    while line := file.readline(LONGEST):
        room -= len(line)
        if room < 0:
            raise CliError(f"{name}: more than {MOST >> 20} MiB; give the end of it")
        if time.monotonic() >= told + TOLD:
            told = time.monotonic()
            if sys.stderr is not None:  # print(file=None) would write it to stdout
                with contextlib.suppress(OSError):
                    print(f"g4debug: {name}: {MOST - room >> 20} MiB are read", file=sys.stderr)
        piece, rest = rest + line, b""
        if len(line) == LONGEST and not line.endswith(b"\n"):
            # Half of an address would be another one, so the piece ends in front of it.
            half = len(piece) - len(piece.rstrip(DIGITS))
            end = len(piece) - half if half < AGAIN else len(piece)
            piece, rest = piece[:end], piece[max(0, end - AGAIN) :]
        yield piece.decode(errors="replace")
    yield rest.decode(errors="replace")
