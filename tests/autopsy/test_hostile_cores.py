"""Core dumps that are damaged or made by somebody: refused in one line, in bounded time."""

from __future__ import annotations

import random
import struct
import time

import pytest
import real_cores

from g4debug.autopsy import elf, examine, images, lines
from g4debug.autopsy.core import Core, read
from g4debug.autopsy.errors import CoreError

pytestmark = pytest.mark.once("a core is read without SGLang")

NAME = "decode-uninitialised"
SECONDS = 5  # some 0.05 are needed
SECTIONS = 40  # where the header has the place of the section table
WORDS = (0, 1, 2, 8, 0x8000_0005, 0x8000_0007, 0x8000_000C, 0x7FFF_FFFF, 0xFFFF_FFFF)


def result(data: bytes):
    """The autopsy, or the words of a refusal. Whatever else happens is a bug."""
    begin = time.monotonic()
    try:
        found = examine.of_core(Core(memoryview(data)), NAME, real_cores.record(NAME))
    except CoreError as e:
        found = str(e)
    assert "\n" not in str(found)
    assert time.monotonic() - begin < SECONDS
    return found


@pytest.mark.parametrize("seed", range(150))
def test_a_core_that_was_changed_is_refused_or_read(seed):
    rng, data = random.Random(seed), bytearray(real_cores.core(NAME))
    table = struct.unpack_from("<Q", data, SECTIONS)[0]
    count = struct.unpack_from("<H", data, 60)[0]
    kind = seed % 4
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        for _ in range(rng.randrange(1, 100)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:
        for _ in range(rng.randrange(1, 8)):
            at = table + 64 * rng.randrange(count) + rng.choice([4, 16, 24, 32, 40, 44, 56])
            struct.pack_into("<I", data, at, rng.choice([*WORDS, rng.getrandbits(32)]))
    else:
        at = table + 64 * rng.randrange(count) + rng.choice([16, 24, 32, 56])
        struct.pack_into("<Q", data, at, rng.choice([1 << 32, 1 << 63, (1 << 64) - 1, 0]))
    result(bytes(data))


def changed(at: int, form: str, value: int) -> bytes:
    data = bytearray(real_cores.core(NAME))
    struct.pack_into(form, data, at, value)
    return bytes(data)


def test_what_is_no_core_dump_says_so():
    assert "no CUDA core dump" in result(b"hello")
    assert "no CUDA core dump" in result(changed(16, "<H", 2))  # an executable
    assert "no CUDA core dump" in result(changed(18, "<H", 62))  # of an x86


def test_a_version_that_is_not_known_is_named():
    found = result(changed(8, "B", 9))
    assert "ABI version 9" in found
    assert "pip install -U g4debug" in found


@pytest.mark.parametrize(
    ("kind", "name"), [(11, "SM table"), (12, "grid table"), (14, "warp table")]
)
def test_a_layout_that_is_not_known_is_named(kind, name):
    data = real_cores.core(NAME)
    table = struct.unpack_from("<Q", data, SECTIONS)[0]
    core = Core(memoryview(data))
    place = core.elf.of_type(0x8000_0000 + kind)[0].place
    found = result(changed(table + 64 * place + 56, "<Q", 4))
    assert f"the layout of its {name} is not known: entries of 4 bytes" in found


def test_fields_that_a_newer_driver_added_are_passed_over():
    """An entry of twice the length has the known fields at its begin."""
    data = bytearray(real_cores.core(NAME))
    table = struct.unpack_from("<Q", data, SECTIONS)[0]
    core = Core(memoryview(bytes(data)))
    (grids,) = core.elf.of_type(0x8000_000C)
    longer = bytes(core.elf.bytes_of(grids)) + b"\xff" * 64
    at = table + 64 * grids.place
    struct.pack_into("<QQ", data, at + 24, len(data), len(longer))
    struct.pack_into("<Q", data, at + 56, len(longer))
    assert Core(memoryview(bytes(data) + longer)).grids == core.grids


def test_sections_of_four_gigabytes_take_neither_time_nor_memory(tmp_path):
    """A sparse file: a section table at its end, of which each section is the whole file."""
    path, size, count = tmp_path / "huge", 4 << 30, 60_000
    data = bytearray(real_cores.core(NAME)[:64])
    struct.pack_into("<Q", data, SECTIONS, size)
    struct.pack_into("<H", data, 60, count)
    begin = time.monotonic()
    for kind in (5, 7, 9, 11, 12, 13, 14, 15, 18):
        row = struct.pack("<IIQQQQIIQQ", 0, 0x8000_0000 + kind, 0, 0, 0, size, 0, 0, 0, 64)
        with path.open("wb") as file:
            file.write(data)
            file.seek(size)
            file.write(row * count)
        with pytest.raises(CoreError) if kind not in (5, 7, 15, 18) else _nothing():
            examine.of_core(read(path), path.name, None)
    assert time.monotonic() - begin < 9 * SECONDS


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False


def test_more_sections_than_a_file_can_have_are_refused():
    data = bytearray(real_cores.core(NAME))
    table = struct.unpack_from("<Q", data, SECTIONS)[0]
    struct.pack_into("<H", data, 60, 0)  # then the first section has the number
    struct.pack_into("<Q", data, table + 32, elf.MOST + 1)
    assert f"more than {elf.MOST}" in result(bytes(data))


def test_lines_that_never_end_are_refused():
    """A unit of advances that make no row, as long as its section."""
    head = bytes([1, 1, 0xFB, 14, 10, 0, 1, 1, 1, 1, 0, 0, 0, 1]) + b"\0a\0\0\0\0\0"
    body = struct.pack("<HI", 2, len(head)) + head + b"\x06" * (lines.MOST + 1)
    with pytest.raises(CoreError, match="more than any kernel's"):
        lines.line_of(memoryview(struct.pack("<I", len(body)) + body), 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("_ZN2at6native12index_kernelIfEEv", "at::native::index_kernel<…>"),
        ("_ZN2at6native55_GLOBAL__N__05612e37_9_Loss_cu_0000000000000000_0000_0004loss", "…"),
        ("_Z6gatherPf", "gather"),
        ("_fwd_kernel", "_fwd_kernel"),
        ("_ZN99999", "_ZN99999"),
        ("_Z", "_Z"),
    ],
)
def test_a_kernels_name_is_taken_apart(name, said):
    found = images.demangled(name)
    assert found == said or (said == "…" and found.startswith("at::native::(anonymous)"))
