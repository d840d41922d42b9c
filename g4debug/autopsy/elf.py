"""Reads the sections of an ELF file: a CUDA core dump, or a kernel's image in it.

The file may be hostile. A section is a view of the file that is never larger than the file, and the
number of sections is bounded by the file's size and by ``MOST``.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from g4debug.autopsy.errors import CoreError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_FIELDS = ["name", "type", "flags", "address", "offset", "size", "link", "info", "align", "entry"]
_SECTION = np.dtype([(name, f"<{form}") for name, form in zip(_FIELDS, "IIQQQQIIQQ", strict=True)])
MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
MOST = 4_000_000  # sections; a core dump of a whole H100 has some 900,000
MOST_OF_A_TYPE = 200_000  # that are taken one by one; those with registers are not
NOBITS = 8  # the type of a section without bytes in the file
LONGEST = 4096  # characters of a name


class Section(NamedTuple):
    """A section. link, info: what they mean depends on the type. place: in the table."""

    place: int
    name: int  # where its name is among the names
    type: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    entry: int  # bytes of an entry of its table, 0 if it is none


class Elf:
    """The header and the section table of an ELF file.

    data: the whole file, as bytes or as a memory map. table: the section headers, a structured
    array [sections]. Raises CoreError.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data
        if len(data) < _HEADER.size or bytes(data[:6]) != MAGIC:
            raise CoreError("it is not a 64-bit ELF file, so it is no CUDA core dump")
        head = _HEADER.unpack_from(data)
        ident, self.type, self.machine = head[:3]
        self.abi, self.abi_version = ident[7], ident[8]
        at, size, count, names = head[6], *head[11:]
        if size != _SECTION.itemsize:
            raise CoreError(f"its sections have headers of {size} bytes, not {_SECTION.itemsize}")
        if not 0 < at <= len(data) - size:
            raise CoreError("it is cut off: its section table is missing")
        first = np.frombuffer(data, _SECTION, 1, at)[0]
        # More sections than the header has room for are counted in the first one.
        count = count or int(first["size"])
        if count > MOST:
            raise CoreError(f"it says that it has {count} sections, more than {MOST}")
        if count * size > len(data) - at:
            raise CoreError("it is cut off: its section table does not end in the file")
        self.table = np.frombuffer(data, _SECTION, count, at)
        self._names_at = int(first["link"]) if names == 0xFFFF else names

    def of_type(self, kind: int) -> list[Section]:
        """The sections of a type, in the order of the table."""
        places = self.places(kind)
        if len(places) > MOST_OF_A_TYPE:
            raise CoreError(f"it has {len(places)} sections of one type, more than any core dump")
        return [self.section(int(n)) for n in places]

    def places(self, kind: int) -> Any:
        """The places in the table of the sections of a type, int64 [n]."""
        return np.flatnonzero(self.table["type"] == kind)

    def section(self, index: int) -> Section:
        """The section at a place of the table. Raises CoreError if there is none."""
        if not 0 <= index < len(self.table):
            raise CoreError(f"it has no section {index}, which another one names")
        row = self.table[index]
        return Section(index, *(int(row[field]) for field in Section._fields[1:]))

    def bytes_of(self, section: Section) -> memoryview:
        """The bytes of a section. Raises CoreError if they are not all in the file."""
        if section.type == NOBITS:
            return self.data[:0]
        end = section.offset + section.size
        if end > len(self.data):
            raise CoreError(
                f"it is cut off: section {section.place} ends at byte {end}, the file at byte "
                f"{len(self.data)}"
            )
        return self.data[section.offset : end]

    def name(self, section: Section) -> str:
        return text_at(self.bytes_of(self.section(self._names_at)), section.name)


def text_at(strings: memoryview, at: int) -> str:
    """The text at a place of a string table, at most ``LONGEST`` characters of it."""
    part = bytes(strings[at : at + LONGEST]) if 0 <= at < len(strings) else b""
    return part.partition(b"\0")[0].decode(errors="replace")
