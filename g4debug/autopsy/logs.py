"""Finds the addresses in a log: of an Xid in dmesg, of compute-sanitizer, of cuda-gdb, of anybody.

A log is full of numbers in hex. What counts is a number that can be an address of CUDA's, beside
words that say what it is, or that complain; others count only if the map knows the address. Of an
Xid, compute-sanitizer and cuda-gdb a number that can be no address counts, too: a null pointer is
what most of them are about. A log may be large, and of anybody: the time grows with its length
alone.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from g4debug.autopsy import places, xid
from g4debug.findings.memory_map import MemoryMap

LOWEST, HIGHEST = 1 << 32, 1 << 57
FIRST, MOST = 1000, 100_000  # addresses of one log: so many are told unless all are asked for
COUNTED = 1_000_000  # so many are counted
LONGEST = 4096  # characters of a line that are told

# Who says it, one of the words that such a line has, and how the address is written.
SAYS = tuple(
    (says, words, re.compile(pattern, re.I))
    for says, words, pattern in (
        # dmesg writes an address in two parts: 7f6f_15400000. A log may have no "NVRM: Xid".
        (
            xid.SAYS,
            ("nvrm: xid", "mmu fault"),
            r"(?:faulted @|addr(?:ess)?:?)\s*(?:0x)?([0-9a-f_]+)",
        ),
        # "Access at" since CUDA 12.9, before that "Address"; "Access to" is in public logs, too.
        (
            "compute-sanitizer",
            ("address 0x", "access at 0x", "access to 0x"),
            r"(?:Address|Access (?:at|to)) 0x([0-9a-f]+) is (?:out of|misaligned)",
        ),
        (
            "cuda-gdb",
            ("illegal access to address",),
            r"Illegal access to address \(@\w+\)\s*0x([0-9a-f]+)",
        ),
        ("PC", ("pc",), r"\bPC:?=?\s*0x([0-9a-f]+)"),  # of cuda-gdb, and of SGLang, which runs it
    )
)
CODE = "PC"
NULL = "no buffer: most likely a pointer that was not set"
WILD = (
    "no buffer: {} bits, and an address has at most {}; a pointer was most likely computed wrongly"
)
IS_CODE = "code of a kernel, and no buffer; g4debug autopsy CORE names the kernel"
ANY = re.compile(r"\b0x([0-9a-f]{8,16})\b", re.I)
COMPLAINT = re.compile(
    r"\b(?:fault(?:ed|ing)?|illegal|invalid|misaligned|out[ -]of[ -]bounds)\b", re.I
)
COMPLAINS = "a complaint"
ANYBODY = -2  # whose process no line names
COLOUR = re.compile(r"\x1b\[[\d;:]*m")  # cuda-gdb writes an address in one
BEFORE, BEHIND = 80, 40  # characters in which somebody complains about an address


@dataclass(frozen=True)
class Found:
    """An address in a log.

    line: its number, from 1. says: whose line it is, '' for anybody's. process: the one that an Xid
    names, -1 for none. doubt: why it may be none of the dump's. at: where in ``text`` the address
    is.
    """

    address: int
    line: int
    says: str
    text: str
    where: str
    process: int = -1
    doubt: str = ""
    at: int = 0


def found(address: int, memory: MemoryMap, line: int = 0, says: str = "", text: str = "") -> Found:
    """An address, with what the map says that it is."""
    rounded = xid.rounding(address) if says == xid.SAYS else 0
    if says == CODE:
        where = IS_CODE
    elif not _is_one(address) and not memory.at(address):
        return Found(address, line, says, text, _no_address(address))
    else:
        where = places.words(address, memory, rounded)
    return Found(address, line, says, text, f"{where}; {xid.ROUNDED}" if rounded else where)


def addresses(
    lines: Iterable[str], memory: MemoryMap, most: int = FIRST, pid: int = -1
) -> tuple[list[Found], int]:
    """Each address once, in the order of the log, and how many more there are than ``most``.

    lines: with their ends; a piece without one is followed by the rest of its line. pid: of the
    dump's process, -1 if it is not known. The Xids of two processes with one address are both told.
    """
    seen: set[tuple[int, int]] = set()  # address and process
    told: list[Found] = []
    starts, ends = _mapped(memory)
    number, count = 1, 0
    for raw in lines:
        line = COLOUR.sub("", raw) if "\x1b" in raw else raw
        for at, says, address in _of(line):
            if not _is_one(address) and not _is_an_exception(line, at, says):
                continue
            process, name = xid.process(line, at) if says == xid.SAYS else (ANYBODY, "")
            if (address, process) in seen:
                continue
            if not says:
                place = bisect.bisect_right(starts, address) - 1
                if place < 0 or address >= ends[place]:
                    continue
            seen |= {(address, process), (address, ANYBODY)}
            count += 1
            if len(told) < most:
                begin = 0 if len(line) <= LONGEST else max(0, at - BEFORE)
                text = line[begin : begin + LONGEST].lstrip()
                skipped = len(line[: begin + LONGEST]) - len(text)
                one = found(address, memory, number, says, text.rstrip())
                one = dataclasses.replace(one, at=max(0, at - skipped))
                if says == xid.SAYS:
                    doubt = xid.doubt(process, name, pid)
                    one = dataclasses.replace(one, process=process, doubt=doubt)
                told.append(one)
        if count >= COUNTED:
            break
        number += line.endswith("\n")
    return told, count - len(told)


def _is_one(address: int) -> bool:
    """Whether it can be an address of CUDA's."""
    return LOWEST <= address < HIGHEST


def _is_an_exception(line: str, at: int, says: str) -> bool:
    """Whether the line is about an access that failed there, be it an address or not."""
    if says in ("", CODE, COMPLAINS) or line[max(0, at - 2) : at].lower() != "0x":
        return False
    return says != xid.SAYS or "mmu fault" in line[max(0, at - xid.BEFORE) : at].lower()


def _no_address(number: int) -> str:
    if number < LOWEST:
        return f"{NULL}, and an offset of {places.size(number)}" if number else NULL
    return WILD.format(number.bit_length(), (HIGHEST - 1).bit_length())


def _mapped(memory: MemoryMap) -> tuple[list[int], list[int]]:
    """Where memory begins that the map knows, sorted, and the furthest end of all up to there."""
    starts: list[int] = []
    ends: list[int] = []
    for r in sorted(memory.known, key=lambda r: r.start):
        starts.append(r.start)
        ends.append(max([r.end, *ends[-1:]]))
    return starts, ends


def _of(line: str) -> Iterator[tuple[int, str, int]]:
    """Where an address is in a line, who says it, and the address."""
    small = line.lower()
    for says, words, pattern in SAYS:
        if any(word in small for word in words):
            for match in pattern.finditer(line):
                if digits := match[1].replace("_", ""):
                    yield match.start(1), says, int(digits, 16)
    somewhere = COMPLAINT.search(line) is not None
    for match in ANY.finditer(line):
        at, end = match.span()
        complains = somewhere and COMPLAINT.search(line, max(0, at - BEFORE), end + BEHIND)
        yield at, COMPLAINS if complains else "", int(match[1], 16)
