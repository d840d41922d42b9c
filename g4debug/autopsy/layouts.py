"""The tables of a CUDA core dump, as NVIDIA's public ``cudacoredump.h`` describes them.

A driver may add fields at the end of an entry, and the section says how long its entries are. So a
table is read by the fields that fit into its entries; the first ones have been there from the
beginning. What each driver added is in the comments.
"""

from __future__ import annotations

import numpy as np

from g4debug.autopsy.errors import CoreError

CORE, CUDA, ABI = 4, 190, 0x33  # ET_CORE, EM_CUDA, ELFOSABI_CUDA
ABI_VERSIONS = (7, 8)  # those that are known; 8 is of CUDA 13's images

_LOUSER = 0x8000_0000
REGISTERS, IMAGE, BACKTRACE = _LOUSER + 5, _LOUSER + 7, _LOUSER + 8
DEVICES, SMS, GRIDS, BLOCKS = _LOUSER + 9, _LOUSER + 11, _LOUSER + 12, _LOUSER + 13
WARPS, LANES, PARAMETERS = _LOUSER + 14, _LOUSER + 15, _LOUSER + 18
UNIFORM, META = _LOUSER + 19, _LOUSER + 22
STRINGS = 3  # SHT_STRTAB
LONGEST = 64 << 10  # bytes of an entry; a driver's longest has some 140, and numpy takes 2 GiB

Fields = tuple[tuple[str, str], ...]


def _fields(kind: str, names: str) -> Fields:
    return tuple((name, kind) for name in names.split())


# Table -> its name, the fields of the first drivers, and those that were added.
TABLES: dict[int, tuple[str, Fields, Fields]] = {
    DEVICES: (
        "device table",
        _fields("<u8", "name internal_name sm_type")
        + _fields("<u4", "id bus device sms warps lanes registers predicates")
        + _fields("<u4", "sm_major sm_minor instruction status"),
        _fields("<u4", "uniform uniform_predicates")  # r400
        + _fields("<u4", "barriers pad0"),  # r575
    ),
    GRIDS: (
        "grid table",
        _fields("<u8", "id context function entry module parent parameters_offset")
        + _fields(
            "<u4", "kind origin status registers grid_x grid_y grid_z block_x block_y block_z"
        )
        + _fields("<u4", "blocking tid"),
        _fields("<u4", "cluster_x cluster_y cluster_z pad0")  # r525
        + _fields("<u4", "preferred_x preferred_y preferred_z pad1"),  # r565
    ),
    SMS: (
        "SM table",
        _fields("<u4", "id pad0"),
        _fields("<u4", "exception error_pc_valid")
        + _fields("<u8", "error_pc")  # r555
        + _fields("<u4", "target_valid target_x target_y target_z"),  # r565
    ),
    BLOCKS: (
        "block table",
        _fields("<u8", "grid") + _fields("<u4", "x y z pad0"),
        _fields("<u4", "cluster_x cluster_y cluster_z pad1")  # r525
        + _fields("<u4", "clusters_x clusters_y clusters_z pad2"),  # r565
    ),
    WARPS: (
        "warp table",
        _fields("<u8", "error_pc") + _fields("<u4", "id valid active broken error_pc_valid pad0"),
        _fields("<u4", "registers pad1")  # r525
        + _fields("<u4", "shared pad2")  # r570
        + _fields("<u4", "in_syscall cbu_active cbu_exited cbu_collective"),  # r575
    ),
    LANES: (
        "thread table",
        _fields("<u8", "pc offset") + _fields("<u4", "lane x y z exception depth syscalls cc"),
        _fields("<u4", "state pad0"),  # r575
    ),
    META: (
        "metadata",  # since r565
        _fields("<u8", "generator")
        + _fields("<u4", "driver_major driver_minor cuda_major cuda_minor flags time"),
        (),
    ),
}

# CUDBGException_t of cudadebugger.h, in the words of cuda-gdb.
EXCEPTIONS = {
    1: "lane illegal address",
    2: "lane user stack overflow",
    3: "device hardware stack overflow",
    4: "warp illegal instruction",
    5: "warp out-of-range address",
    6: "warp misaligned address",
    7: "warp invalid address space",
    8: "warp invalid PC",
    9: "warp hardware stack overflow",
    10: "device illegal address",
    11: "lane misaligned address",
    12: "warp assert",
    13: "lane syscall error",
    14: "warp illegal address",
    15: "lane non-migratable atomic",
    16: "lane invalid atomic",
    17: "cluster out-of-range address",
    18: "cluster block not present",
    19: "warp stack canary",
    20: "warp tensor memory access check",
    21: "warp tensor memory leak",
    22: "warp call requires newer driver",
}
ASSERT = 12
# By the comments of cudadebugger.h and by cuda-gdb's manual: an address of global memory that may
# not be accessed; one that may, but at no multiple of the access's size. All others are about
# something else, and what the registers hold as an address then is no evidence.
ILLEGAL_ADDRESS = {1, 10, 14}
MISALIGNED = {6, 11}
ABOUT = {
    2: "the stack of a thread",
    3: "the hardware's stack",
    4: "an instruction that is none",
    5: "local or shared memory, or an address that no memory can have",
    7: "memory of a kind that the instruction may not access",
    8: "the address of an instruction",
    9: "the hardware's stack",
    17: "the shared memory of a cluster of blocks",
    18: "a block of a cluster that is not there",
    19: "the stack of a thread",
}


def exception(number: int) -> str:
    """For example ``CUDA_EXCEPTION_14: warp illegal address``."""
    return f"CUDA_EXCEPTION_{number}: {EXCEPTIONS.get(number, 'not one that is known here')}"


def about(number: int) -> str:
    """Why an exception accuses no page: a clause."""
    if not number:
        return "the core dump notes no exception"
    known = ABOUT.get(number, "something that g4debug does not know to be an address")
    return f"this exception is about {known}"


def table(kind: int, data: memoryview, entry: int) -> np.ndarray:
    """The entries of a table, a structured array [n]. Raises CoreError for an unknown layout."""
    name, first, added = TABLES[kind]
    if kind == META:  # it is one entry, and says no size of it
        entry = len(data)
    if not len(data):
        return np.zeros(0, [*first])
    if entry > LONGEST:
        raise CoreError(
            f"its {name} is damaged: entries of {entry} bytes, where at most {LONGEST} are expected"
        )
    names, formats, offsets, at = [], [], [], 0
    for n, (field, form) in enumerate((*first, *added)):
        size = int(form[-1])
        if at + size > entry:
            if n < len(first):
                needed = sum(int(f[-1]) for _, f in first)
                raise CoreError(
                    f"the layout of its {name} is not known: entries of {entry} bytes, where the "
                    f"oldest driver has {needed}"
                )
            break
        names.append(field)
        formats.append(form)
        offsets.append(at)
        at += size
    if len(data) % entry:
        raise CoreError(f"its {name} is damaged: {len(data)} bytes are no entries of {entry}")
    layout = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": entry})
    return np.frombuffer(data, layout)
