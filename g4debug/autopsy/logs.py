"""Finds the addresses in a log: of an Xid in dmesg, of compute-sanitizer, of cuda-gdb, of anybody.

A log is full of numbers in hex. What counts is a number that can be an address of CUDA's, in a line
that says what it is; other lines count only if the map knows the address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from g4debug.autopsy import places
from g4debug.findings.memory_map import MemoryMap

LOWEST, HIGHEST = 1 << 32, 1 << 57
FIRST, MOST = 1000, 100_000  # addresses of one log: so many are told unless all are asked for
COUNTED = 1_000_000  # so many are counted
LONGEST = 4096  # characters of a line that are looked at

# Who says it, and how. dmesg writes an address in two parts: 7f6f_15400000.
SAYS = tuple(
    (says, re.compile(pattern, re.I))
    for says, pattern in (
        ("Xid in dmesg", r"NVRM: Xid.*?(?:faulted @|addr(?:ess)?:?)\s*(?:0x)?([0-9a-f_]+)"),
        ("compute-sanitizer", r"Address 0x([0-9a-f]+) is (?:out of|misaligned)"),
        ("cuda-gdb", r"Illegal access to address \(@\w+\)\s*0x([0-9a-f]+)"),
        ("PC", r"\bPC:?=?\s*0x([0-9a-f]+)"),  # of cuda-gdb, and of SGLang, which runs it
    )
)
CODE = "PC"
IS_CODE = "code of a kernel, and no buffer; g4debug autopsy CORE names the kernel"
ANY = re.compile(r"\b0x([0-9a-f]{8,16})\b", re.I)


@dataclass(frozen=True)
class Found:
    """An address in a log. line: its number, from 1. says: whose line it is, '' for anybody's."""

    address: int
    line: int
    says: str
    text: str
    where: str


def found(address: int, memory: MemoryMap, line: int = 0, says: str = "", text: str = "") -> Found:
    """An address, with what the map says that it is."""
    where = IS_CODE if says == CODE else places.words(address, memory)
    return Found(address, line, says, text, where)


def addresses(
    lines: Iterable[str], memory: MemoryMap, most: int = FIRST
) -> tuple[list[Found], int]:
    """Each address once, in the order of the log, and how many more there are than ``most``."""
    seen: set[int] = set()
    told: list[Found] = []
    for number, raw in enumerate(lines, 1):
        line = raw[:LONGEST]
        for says, address in _of(line):
            known = memory.at(address)
            if address in seen or not (LOWEST <= address < HIGHEST) or not (says or known):
                continue
            seen.add(address)
            if len(told) < most:
                told.append(found(address, memory, number, says, line.strip()))
        if len(seen) >= COUNTED:
            break
    return told, len(seen) - len(told)


def _of(line: str) -> Iterator[tuple[str, int]]:
    for says, pattern in SAYS:
        for match in pattern.finditer(line):
            if digits := match[1].replace("_", ""):
                yield says, int(digits, 16)
    yield from (("", int(match[1], 16)) for match in ANY.finditer(line))
