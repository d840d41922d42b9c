"""Finds the source line of an address in a ``.debug_line`` section (DWARF 2 to 4).

That is what Triton and ``nvcc -lineinfo`` leave in a kernel's image. The section may be hostile:
the work is bounded by ``MOST`` operations, numbers and names together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from g4debug.autopsy.elf import LONGEST
from g4debug.autopsy.errors import CoreError

MOST = 2_000_000  # operations, numbers and names of all units
MOST_FILES = 10_000  # of a unit
WIDEST = 8  # bytes of an address
# Standard operations, and the extended ones behind a 0.
COPY, ADVANCE_PC, ADVANCE_LINE, SET_FILE, SET_COLUMN, NEGATE, BASIC, CONST_ADD, FIXED = range(1, 10)
END, SET_ADDRESS = 1, 2


@dataclass
class _Unit:
    """A unit's header. step: bytes of an instruction's smallest distance."""

    step: int
    base: int  # the smallest advance of the line by a special operation
    range: int
    first: int  # the first special operation
    arguments: bytes  # of the standard operations
    files: list[str] = field(default_factory=list)


class _Reader:
    """room: how much work is left, of all units of a section."""

    def __init__(self, data: memoryview, room: list[int]) -> None:
        self.data, self.at, self.room = data, 0, room

    def spend(self) -> None:
        self.room[0] -= 1
        if self.room[0] < 0:
            raise CoreError("its lines are more than any kernel's")

    def number(self, size: int) -> int:
        end = self.at + size
        if size < 0 or end > len(self.data):
            raise CoreError("its lines are cut off")
        found = int.from_bytes(self.data[self.at : end], "little")
        self.at = end
        return found

    def variable(self, signed: bool = False) -> int:
        self.spend()
        found = shift = 0
        while shift < 70:
            byte = self.number(1)
            found |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return found - (1 << shift) if signed and byte & 0x40 else found
        raise CoreError("a number of its lines is too long")

    def text(self) -> str:
        self.spend()
        part = bytes(self.data[self.at : self.at + LONGEST])
        size = part.find(0)
        if size < 0:
            raise CoreError("a name of its lines is cut off, or longer than any file's")
        self.at += size + 1
        return part[:size].decode(errors="replace")


def line_of(section: memoryview, address: int) -> str:
    """For example ``decode_attention.py:353``; '' if no unit has the address.

    Raises CoreError if the section is damaged, or of a version that is not known.
    """
    at, room = 0, [MOST]
    while at + 4 <= len(section):
        size = int.from_bytes(section[at : at + 4], "little")
        if size >= 0xFFFF_FFF0 or at + 4 + size > len(section):
            raise CoreError("its lines are cut off, or of DWARF's 64-bit form")
        if found := _in_unit(_Reader(section[at + 4 : at + 4 + size], room), address):
            return found
        at += 4 + size
    return ""


def _in_unit(reader: _Reader, address: int) -> str:
    unit = _header(reader)
    pc, file, line = 0, 1, 1
    last: tuple[int, int, int] | None = None  # (pc, file, line) of the row before
    while reader.at < len(reader.data):
        reader.spend()
        code, row, end = reader.number(1), False, False
        if code >= unit.first:
            advance = code - unit.first
            pc += advance // unit.range * unit.step
            line += unit.base + advance % unit.range
            row = True
        elif code == 0:
            size = reader.variable()
            then = reader.at + size
            kind = reader.number(1) if size else 0
            if kind == SET_ADDRESS:
                if size - 1 > WIDEST:
                    raise CoreError("an address of its lines is too long")
                pc = reader.number(size - 1)
            end = row = kind == END
            reader.at = then
        elif code == COPY:
            row = True
        elif code == ADVANCE_PC:
            pc += reader.variable() * unit.step
        elif code == ADVANCE_LINE:
            line += reader.variable(signed=True)
        elif code == SET_FILE:
            file = reader.variable()
        elif code == CONST_ADD:
            pc += (255 - unit.first) // unit.range * unit.step
        elif code == FIXED:
            pc += reader.number(2)
        else:
            for _ in range(unit.arguments[code - 1]):
                reader.variable()
        if row:
            if last is not None and last[0] <= address < pc:
                name = unit.files[last[1] - 1] if 0 < last[1] <= len(unit.files) else "?"
                return f"{name}:{last[2]}"
            last = None if end else (pc, file, line)
        if end:
            pc, file, line = 0, 1, 1
    return ""


def _header(reader: _Reader) -> _Unit:
    version, size = reader.number(2), reader.number(4)
    if not 2 <= version <= 4:
        raise CoreError(f"its lines are of DWARF {version}; known are 2 to 4")
    then = reader.at + size
    step = reader.number(1)
    if version == 4:
        reader.number(1)  # operations of an instruction
    reader.number(1)  # whether a row is a statement
    base = (reader.number(1) ^ 0x80) - 0x80
    unit = _Unit(step, base, reader.number(1) or 1, first := reader.number(1) or 1, b"")
    unit.arguments = bytes(reader.number(1) for _ in range(first - 1))
    while reader.text():  # folders
        pass
    while name := reader.text():
        unit.files.append(name)
        if len(unit.files) > MOST_FILES:
            raise CoreError("its lines are of more files than any kernel's")
        for _ in range(3):  # folder, time, size
            reader.variable()
    reader.at = then
    return unit
