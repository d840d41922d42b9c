"""The kernels' images in a core dump: names, source lines, and the instruction at an address."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from g4debug.autopsy import lines
from g4debug.autopsy.elf import Elf, Section, text_at
from g4debug.autopsy.errors import CoreError

SYMBOLS, CODE = 2, 1  # SHT_SYMTAB, SHT_PROGBITS
FUNCTION = 2  # STT_FUNC
_FIELDS = ["name", "info", "other", "section", "value", "size"]
_SYMBOL = np.dtype([(name, f"<{form}") for name, form in zip(_FIELDS, "IBBHQQ", strict=True)])
INSTRUCTION = 16  # bytes, since Volta
# The low 12 bits of the instructions that read or write global memory by an address in registers:
# LD, LDG, ST, STG, LDGSTS, ATOM, ATOMG, RED. Seen in NVIDIA's disassembly of sm_70 to sm_90; on
# another architecture the same bits may be another instruction.
ARCHITECTURES = {7, 8, 9}
MEMORY = {
    0x980: "LD", 0x981: "LDG", 0x985: "ST", 0x986: "STG", 0xFAE: "LDGSTS", 0x38A: "ATOM",
    0x3A8: "ATOMG", 0x9A8: "ATOMG", 0x98E: "RED", 0x9A6: "REDG",
}  # fmt: skip
LONGEST_NUMBER = 5  # digits of the length of a name
COPIES = "LDGSTS"
NO_LINES = "the kernel was compiled without lines"
ZERO = 255  # the register that is always 0


@dataclass(frozen=True)
class Access:
    """An instruction that reads or writes memory: the address is a pair of registers + offset."""

    name: str  # "LDG"
    register: int  # the first of the pair
    offset: int


@dataclass(frozen=True)
class Place:
    """An address in a kernel. line: '' if its image has none; why: the reason, '' if it has."""

    kernel: str = ""
    offset: int = -1  # bytes from the function's begin
    line: str = ""
    access: Access | None = None
    why: str = ""


def find(images: Iterable[memoryview], *addresses: int) -> list[Place]:
    """The function that each address is in; -1 is none. A damaged image is passed over.

    One pass over the images: a core dump of a server has hundreds of megabytes of them.
    """
    found = {-1: Place()}
    for data in images:
        if found.keys() >= set(addresses):
            break
        try:
            elf = Elf(data)
            for at in elf.places(SYMBOLS)[:1]:
                section = elf.section(int(at))
                for address in set(addresses) - found.keys():
                    function = _function(elf, section, address)
                    if function is not None:
                        found[address] = _place(elf, *function, address)
        except CoreError:
            continue
    unknown = Place(why="no image in the core dump has this address")
    return [found.get(address, unknown) for address in addresses]


def _function(elf: Elf, section: Section, pc: int) -> tuple[str, int] | None:
    data = elf.bytes_of(section)
    symbols = np.frombuffer(data[: len(data) // _SYMBOL.itemsize * _SYMBOL.itemsize], _SYMBOL)
    inside = (symbols["value"] <= pc) & (pc - symbols["value"] < symbols["size"])
    inside &= ((symbols["info"] & 15) == FUNCTION) & (symbols["value"] > 0)
    at = np.flatnonzero(inside)
    if not len(at):
        return None
    symbol = symbols[at[0]]
    strings = elf.bytes_of(elf.section(section.link))
    return text_at(strings, int(symbol["name"])), int(symbol["value"])


def _place(elf: Elf, name: str, begin: int, pc: int) -> Place:
    line, why = "", NO_LINES
    access = None
    read = False
    for section in elf.of_type(CODE):
        if section.address <= pc < section.address + section.size:
            code = elf.bytes_of(section)
            access = decode(bytes(code[pc - section.address :][:INSTRUCTION]))
        elif not read and elf.name(section) == ".debug_line":
            read = True
            try:
                line = lines.line_of(elf.bytes_of(section), pc)
                why = "" if line else "the kernel's lines do not have this address"
            except CoreError as e:
                why = str(e)
    return Place(demangled(name), pc - begin, line, access, why)


def decode(instruction: bytes) -> Access | None:
    """The memory access of an instruction; None if it is none that is known."""
    if len(instruction) < INSTRUCTION:
        return None
    word = int.from_bytes(instruction[:8], "little")
    name = MEMORY.get(word & 0xFFF)
    register = word >> 24 & 0xFF
    if name is None or register == ZERO:
        return None
    # The same bits are the offset in shared memory where an instruction copies there.
    offset = 0 if name == COPIES else word >> 40
    return Access(name, register, offset - (1 << 24) if offset >> 23 else offset)


_PART = re.compile(r"(\d+)")


def demangled(name: str) -> str:
    """The name of a C++ function without its template arguments: ``at::native::index_kernel<…>``.

    Only nested names are taken apart. A kernel of Triton has its own name.
    """
    if not name.startswith("_Z"):
        return name
    at = 2 + (name[2:3] == "N")
    parts: list[str] = []
    while found := _PART.match(name, at):
        begin = found.end()
        size = int(found[1][:LONGEST_NUMBER])
        if not 0 < size <= len(name) - begin:
            break
        at = begin + size
        part = name[begin:at]
        parts.append("(anonymous)" if part.startswith("_GLOBAL__N_") else part)
    if not parts:
        return name
    return "::".join(parts) + ("<…>" if name[at : at + 1] == "I" else "")
