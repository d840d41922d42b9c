"""Core dumps that are damaged or made by somebody: refused in one line, in bounded time."""

from __future__ import annotations

import random
import struct
import time

import pytest
import real_cores

from g4debug.autopsy import elf, examine, images, layouts, lines
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


@pytest.mark.parametrize("kind", sorted(layouts.TABLES))
def test_an_entry_of_gigabytes_is_refused_by_its_tables_name(kind, tmp_path):
    """A sparse file. numpy has no entry of 2 GiB, and said so in words of its own."""
    data, size = bytearray(real_cores.core(NAME)), 3 << 30
    table = struct.unpack_from("<Q", data, SECTIONS)[0]
    place = Core(memoryview(bytes(data))).elf.of_type(kind)[0].place
    struct.pack_into("<QQ", data, table + 64 * place + 24, len(data), size)
    struct.pack_into("<Q", data, table + 64 * place + 56, size)
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + size)
    begin = time.monotonic()
    with pytest.raises(CoreError, match=f"its {layouts.TABLES[kind][0]} is damaged: entries of"):
        examine.of_core(read(path), path.name, None)
    assert time.monotonic() - begin < SECONDS


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


@pytest.mark.long("one kind of lines more")
def test_lines_that_never_end_are_refused():
    """A unit of advances that make no row, as long as its section."""
    head = bytes([1, 1, 0xFB, 14, 10, 0, 1, 1, 1, 1, 0, 0, 0, 1]) + b"\0a\0\0\0\0\0"
    body = struct.pack("<HI", 2, len(head)) + head + b"\x06" * (lines.MOST + 1)
    with pytest.raises(CoreError, match="more than any kernel's"):
        lines.line_of(memoryview(struct.pack("<I", len(body)) + body), 1)


HEAD = bytes([1, 1, 0xFB, 14, 10, 0, 1, 1, 1, 1, 0, 0, 0, 1])
NO_FILES = b"\0\0"
MANY = HEAD[:4] + bytes([11]) + HEAD[5:] + b"\xff" + NO_FILES  # operation 10 has 255 arguments


def unit(head: bytes, body: bytes = b"") -> bytes:
    """A unit of lines: its header behind version and size, and its operations."""
    whole = struct.pack("<HI", 2, len(head)) + head + body
    return struct.pack("<I", len(whole)) + whole


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (unit(HEAD + b"a" * 8_000_000 + b"\0\0"), "longer than any file's"),
        (unit(HEAD + b"\0" + b"a\0\0\0\0" * 1_000_000 + b"\0"), "of more files than any kernel's"),
        # Units of many folders, each with room enough for itself.
        pytest.param(
            unit(HEAD + b"a\0" * 900_000 + NO_FILES) * 3,
            "more than any kernel's",
            marks=pytest.mark.long("one kind more"),
        ),
        # An operation of 255 arguments, again and again.
        (unit(MANY, (b"\x0a" + b"\0" * 255) * 9000), "more than any kernel's"),
        (unit(HEAD + NO_FILES, b"\0\x80\x80\x40\x02" + b"\xff" * 1_000_000), "address .* too long"),
    ],
    ids=["name", "files", "folders", "arguments", "address"],
)
def test_lines_of_any_kind_take_bounded_work(section, why, monkeypatch):
    work = []
    number = lines._Reader.number
    monkeypatch.setattr(lines._Reader, "number", lambda r, n: work.append(n) or number(r, n))
    with pytest.raises(CoreError, match=why):
        lines.line_of(memoryview(section), 1)
    assert sum(work) < 3 * lines.MOST


def within(data: bytes, place: int, inner: bytes) -> bytes:
    """An ELF file of which a section is other bytes."""
    out = bytearray(data)
    out += b"\0" * (-len(out) % 8)
    table = struct.unpack_from("<Q", out, SECTIONS)[0]
    struct.pack_into("<QQ", out, table + 64 * place + 24, len(out), len(inner))
    return bytes(out) + inner


def test_lines_and_images_of_a_core_take_bounded_work(monkeypatch):
    """The lines of its kernel's image, and one image of very many symbol tables under each name."""
    data = real_cores.core(NAME)
    core = Core(memoryview(data))
    (warp, *_) = core.warps
    all_ = core.elf.of_type(layouts.IMAGE)
    for image in all_:
        inner = bytes(core.elf.bytes_of(image))
        if images.find([memoryview(inner)], warp.error_pc)[0].kernel:
            break
    of = elf.Elf(memoryview(inner))
    (place,) = (n for n in range(len(of.table)) if of.name(of.section(n)) == ".debug_line")
    long = within(inner, place, unit(HEAD + b"a" * 8_000_000 + b"\0\0"))
    found = result(within(data, image.place, long))
    assert any("longer than any file's" in note for note in found.notes)

    count = 190_000
    row = struct.pack("<IIQQQQIIQQ", 0, images.SYMBOLS, 0, 0, 0, count, 0, 0, 0, 24)
    many = bytearray(inner[:64]) + bytearray(row * count)
    struct.pack_into("<Q", many, SECTIONS, 64)
    struct.pack_into("<HH", many, 60, 0, 0)
    at, out = len(data), bytearray(data) + many
    table = struct.unpack_from("<Q", out, SECTIONS)[0]
    for image in all_:
        struct.pack_into("<QQ", out, table + 64 * image.place + 24, at, len(many))
    opened, section = [], elf.Elf.section
    monkeypatch.setattr(elf.Elf, "section", lambda e, n: opened.append(n) or section(e, n))
    found = result(bytes(out))
    assert (
        "the source line cannot be told: no image in the core dump has this address" in found.notes
    )
    assert len(opened) < 20_000
    assert sum(len(i) for i in Core(memoryview(bytes(out))).images()) <= len(out)


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
