"""A CUDA core dump: its device, its grids, and its warps with the registers of their lanes."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from g4debug.autopsy import layouts
from g4debug.autopsy.elf import Elf, Section, text_at
from g4debug.autopsy.errors import CoreError
from g4debug.dumps.heads import open_at_once

MOST_PARAMETERS = 32 << 10  # bytes of a kernel's parameters; CUDA's own limit
MOST_ROWS = 400_000  # of all tables
MOST_IMAGES = 20_000
WARP = 32  # lanes


@dataclass(frozen=True)
class Grid:
    """A kernel that ran. parameters: as they were passed."""

    id: int
    entry: int  # address of the kernel's code
    size: tuple[int, int, int]  # blocks in x, y, z
    threads: tuple[int, int, int]  # of a block
    parameters: bytes


@dataclass(frozen=True)
class Warp:
    """A warp of a block. error_pc: the address of the instruction that faulted, -1 for none."""

    grid: int  # its id
    sm: int  # number of the multiprocessor
    block: tuple[int, int, int]
    error_pc: int
    lanes: Any  # the thread table, a structured array [lanes]
    place: int  # of the thread table among the sections

    @property
    def faulted(self) -> bool:
        return self.error_pc >= 0 or bool(self.lanes["exception"].any())


class Core:
    """What is in a core dump. Raises CoreError for what is none, is damaged or is not known."""

    def __init__(self, data: memoryview) -> None:
        self.elf = Elf(data)
        self._room = MOST_ROWS
        found = (self.elf.type, self.elf.machine, self.elf.abi)
        if found != (layouts.CORE, layouts.CUDA, layouts.ABI):
            raise CoreError("it is an ELF file, but no CUDA core dump")
        if self.elf.abi_version not in layouts.ABI_VERSIONS:
            known = " and ".join(map(str, layouts.ABI_VERSIONS))
            raise CoreError(
                f"a CUDA core dump of ABI version {self.elf.abi_version}, which this g4debug does "
                f"not know (known: {known}); run: pip install -U g4debug"
            )
        strings = self.elf.of_type(layouts.STRINGS)
        self._strings = self.elf.bytes_of(strings[0]) if strings else memoryview(b"")
        devices = [row for _, row in self._rows(layouts.DEVICES)]
        self.device = next((text_at(self._strings, int(d["name"])) for d in devices), "")
        self.architectures = {int(d["sm_major"]) for d in devices}  # 9 of an H100

    @cached_property
    def meta(self) -> Any:
        """The metadata, None in the dump of a driver before r565."""
        return next((row for _, row in self._rows(layouts.META)), None)

    @property
    def driver(self) -> str:
        m = self.meta
        if m is None:
            return ""
        driver, cuda = ((m[f"{of}_major"], m[f"{of}_minor"]) for of in ("driver", "cuda"))
        return f"{driver[0]}.{driver[1]}, CUDA {cuda[0]}.{cuda[1]}"

    @property
    def time(self) -> str:
        """When it was written, ISO 8601, UTC."""
        if self.meta is None:
            return ""
        return datetime.fromtimestamp(int(self.meta["time"]), UTC).isoformat()

    @cached_property
    def grids(self) -> dict[int, Grid]:
        """The kernels that ran, by their id."""
        parameters = {
            (s.link, s.info): self.elf.bytes_of(s)[:MOST_PARAMETERS]
            for s in self.elf.of_type(layouts.PARAMETERS)
        }
        found = {}
        for (section, at), g in self._placed(layouts.GRIDS):
            size, threads = (
                (int(g[f"{of}_x"]), int(g[f"{of}_y"]), int(g[f"{of}_z"]))
                for of in ("grid", "block")
            )
            held = bytes(parameters.get((section.place, at), b""))
            found[int(g["id"])] = Grid(int(g["id"]), int(g["entry"]), size, threads, held)
        return found

    @cached_property
    def multiprocessors(self) -> dict[int, tuple[int, int]]:
        """Multiprocessor -> (exception, error pc or -1), also of warps that have ended since."""
        found = {}
        for _, sm in self._rows(layouts.SMS):
            if "exception" in (sm.dtype.names or ()) and sm["exception"]:
                pc = int(sm["error_pc"]) if sm["error_pc_valid"] else -1
                found[int(sm["id"])] = int(sm["exception"]), pc
        return found

    @cached_property
    def warps(self) -> list[Warp]:
        """All warps, those that faulted first."""
        blocks = {
            (section.place, at): (section, row)
            for (section, at), row in self._placed(layouts.BLOCKS)
        }
        lanes = {(s.link, s.info): s for s in self.elf.of_type(layouts.LANES)}
        found = []
        for (section, at), warp in self._placed(layouts.WARPS):
            if (section.link, section.info) not in blocks:
                raise CoreError(f"section {section.place} names a block that is not there")
            of, block = blocks[section.link, section.info]
            threads = lanes.get((section.place, at))
            if threads is None:
                continue
            found.append(
                Warp(
                    grid=int(block["grid"]),
                    sm=of.info,
                    block=(int(block["x"]), int(block["y"]), int(block["z"])),
                    error_pc=int(warp["error_pc"]) if warp["error_pc_valid"] else -1,
                    lanes=self._table(threads),
                    place=threads.place,
                )
            )
        return sorted(found, key=lambda w: not w.faulted)

    def registers(self, warp: Warp) -> Any:
        """The registers of a warp's lanes, uint32 [lanes, registers]. A lane without any is 0."""
        places, links = self._registers
        begin, end = np.searchsorted(links, (warp.place, warp.place + 1))
        rows: dict[int, Any] = {}
        for place in places[begin:end][:WARP]:
            section = self.elf.section(int(place))
            data = self.elf.bytes_of(section)
            rows[section.info] = np.frombuffer(data[: len(data) // 4 * 4], "<u4")[:256]
        width = max(map(len, rows.values()), default=0)
        out = np.zeros((len(warp.lanes), width), "<u4")
        for lane, values in rows.items():
            if lane < len(out):
                out[lane, : len(values)] = values
        return out

    @cached_property
    def _registers(self) -> tuple[Any, Any]:
        """The sections with registers and the thread tables that they are of, sorted by these."""
        places = self.elf.places(layouts.REGISTERS)
        links = self.elf.table["link"][places]
        order = np.argsort(links, kind="stable")
        return places[order], links[order]

    def images(self) -> Iterator[memoryview]:
        """The kernels' images. Those of a real core dump do not lie in each other, so that all of
        them are not larger than the file."""
        room = len(self.elf.data)
        for section in self.elf.of_type(layouts.IMAGE)[:MOST_IMAGES]:
            data = self.elf.bytes_of(section)
            room -= len(data)
            if room < 0:
                return
            yield data

    def _table(self, section: Section) -> Any:
        rows = layouts.table(section.type, self.elf.bytes_of(section), section.entry)
        self._room -= len(rows)
        if self._room < 0:
            raise CoreError("its tables have more entries than any core dump's")
        if section.type == layouts.LANES and len(rows) > WARP:
            raise CoreError(f"it is damaged: a warp of {len(rows)} lanes")
        return rows

    def _rows(self, kind: int) -> Iterator[tuple[Section, Any]]:
        for section in self.elf.of_type(kind):
            yield from ((section, row) for row in self._table(section))

    def _placed(self, kind: int) -> Iterator[tuple[tuple[Section, int], Any]]:
        for section in self.elf.of_type(kind):
            yield from (((section, at), row) for at, row in enumerate(self._table(section)))


def read(path: Path) -> Core:
    """A core dump in a file, which is mapped. Raises CoreError, also if it cannot be read.

    It is opened without waiting: a FIFO that nobody writes to would hang for ever.
    """
    try:
        with open(path, "rb", opener=open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CoreError(
                    "it is not a regular file, so it is no CUDA core dump; give the file that the "
                    "driver has written"
                )
            if not status.st_size:
                raise CoreError("it is empty")
            return Core(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError) as e:
        raise CoreError(f"cannot be read: {getattr(e, 'strerror', None) or e}") from e
