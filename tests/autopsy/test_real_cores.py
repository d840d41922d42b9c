"""The autopsy of real core dumps of a H100: each names what was broken, or says what it lost.

``tests/gpu/make_cores.py`` made them with SGLang 0.5.12.post1's Triton attention, FlashInfer's XQA,
PyTorch's embedding and index kernels, and a kernel without lines. cuda-gdb's words about each were
kept. In the line tables, the folders of that machine were replaced.
"""

from __future__ import annotations

import dataclasses
import io
import struct

import numpy as np
import pytest
import real_cores
from elftools.elf.elffile import ELFFile

from g4debug.autopsy import examine, images, layouts, votes
from g4debug.autopsy.core import Core
from g4debug.findings.memory_map import MemoryMap
from g4debug.findings.record import PageEvent

ATTENTION = [n for n in real_cores.NAMES if "at" in real_cores.truth(n)]
LOST = ["decode-negative"]  # the registers went on to the next token before the fault reached them
BOTH = ["extend-larger-pool"]  # K and V of the same page were on their way
WRAPS = {"xqa-uninitialised": 0x1FF_FFFF}  # XQA multiplies the page in 32 bits
# Only the distance tells, in registers that the instruction does not name: that is not enough where
# an address that no range has may be in a segment that the map lacks.
NEEDS_SEGMENTS = ["xqa-larger-pool", "xqa-uninitialised"]


def autopsy(name, **fields):
    return examine.of_core(
        Core(memoryview(real_cores.core(name))), f"{name}.core", real_cores.record(name, **fields)
    )


def named(name):
    """The page that was put into the list or table."""
    told = real_cores.truth(name)
    return WRAPS.get(name, told["value"] // (1 if "pages" in told else told["page_size"]))


@pytest.mark.parametrize("name", real_cores.NAMES)
def test_the_sections_are_those_that_pyelftools_reads(name):
    data = real_cores.core(name)
    ours = Core(memoryview(data)).elf
    theirs = ELFFile(io.BytesIO(data))
    assert len(ours.table) == theirs.num_sections()
    for place in {*range(0, len(ours.table), 97), len(ours.table) - 1}:
        section, other = ours.section(place), theirs.get_section(place)
        assert (ours.name(section), section.size) == (other.name, other["sh_size"])
        assert bytes(ours.bytes_of(section)) == other.data()


@pytest.mark.parametrize("name", real_cores.NAMES)
def test_the_tables_are_those_of_the_header(name):
    """A warp's block is in its grid, and its lanes are its threads."""
    core = Core(memoryview(real_cores.core(name)))
    assert core.device.startswith("NVIDIA H")
    assert core.driver.startswith("580.")
    assert core.grids
    for warp in core.warps:
        grid = core.grids[warp.grid]
        assert all(b < n for b, n in zip(warp.block, grid.size, strict=True))
        assert sorted(warp.lanes["lane"]) == list(range(32))
        assert core.registers(warp).shape[0] == 32


@pytest.mark.parametrize("name", real_cores.NAMES)
def test_it_says_what_cuda_gdb_says(name):
    told, found = real_cores.truth(name)["cuda_gdb"], autopsy(name)
    for field in ("line", "block"):
        if field in told:
            assert list(getattr(found, field)) == list(told[field])
    if "function" in told:
        assert found.kernel == told["function"]
    if told.get("exception") == "Assertion failed":
        assert found.exception == "CUDA_EXCEPTION_12: warp assert"
    elif "exception" in told:
        assert told["exception"].lower() in found.exception
    first = next((n.partition("in registers ")[2] for n in found.notes if "registers R" in n), "")
    assert first or "instruction" not in told or found.agree < 0 or name in NEEDS_SEGMENTS
    if "instruction" in told and first:
        assert f"[{first.split()[0]}.64" in told["instruction"]


@pytest.mark.parametrize("name", [n for n in ATTENTION if n not in LOST])
@pytest.mark.parametrize("segments", [True, False])
def test_the_page_the_layer_the_row_and_the_request_are_named(name, segments):
    row, _, layer = real_cores.truth(name)["at"]
    found = autopsy(name, segments=segments)
    if not segments and name in NEEDS_SEGMENTS:
        assert (found.page, found.pages, found.address) == (-1, -1, -1)
        return
    assert any("has not all of PyTorch's segments" in n for n in found.notes) == (not segments)
    assert (found.pool, found.layer, found.page) == ("swa", layer, named(name)), found
    assert found.pages == 373
    assert (found.row, found.request) == (row, f"request-{row}")
    assert found.agree == found.lanes > 0
    assert found.part == ("K or V" if name in BOTH else "V" if "million" in name else "K")
    if name not in BOTH + list(WRAPS):
        told = real_cores.truth(name)
        begin = told[f"expected_{found.part.lower()}"]
        assert begin <= found.address < begin + 64 * 1024
    likely = "most likely " * ("most likely" in found.verdict)
    begins = f"{likely}page {named(name)} of {found.part}, layer {layer} (the SWA pool has pages 0"
    assert found.verdict.startswith(
        f"{begins} to 372), row {row} of the batch, request request-{row}"
    )
    assert found.cause


@pytest.mark.parametrize("name", LOST)
def test_an_address_that_was_written_over_is_not_guessed(name):
    row, _, layer = real_cores.truth(name)["at"]
    found = autopsy(name)
    assert (found.pool, found.layer, found.part) == ("swa", layer, "V")
    assert (found.page, found.pages, found.address) == (-1, -1, -1)
    assert (
        "some page of V of layer 0 (swa pool): no register has the address any more"
        in found.verdict
    )
    assert found.row == row
    assert found.cause == ""


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("given", [True, False])
def test_without_a_map_no_address_is_said_to_have_faulted(name, given):
    """Of ``LOST`` the registers hold a valid address by now, and of XQA they hold anything."""
    core = Core(memoryview(real_cores.core(name)))
    record = real_cores.record(name, memory=None) if given else None
    found = examine.of_core(core, "x", record)
    assert "which address faulted cannot be told without the memory map" in found.verdict
    assert "no register" not in found.verdict
    assert "0x" not in found.verdict
    assert (found.address, found.agree, found.page) == (-1, -1, -1)
    assert any(("no dump was given", "the dump has no memory map")[given] in n for n in found.notes)
    assert all("may be another address" in n for n in found.notes if "0x" in n)


def with_exception(name, number):
    """A real core, with another exception in its lanes and multiprocessors."""
    data = bytearray(real_cores.core(name))
    core = Core(memoryview(bytes(data)))
    for kind in (layouts.LANES, layouts.SMS):
        for section in core.elf.of_type(kind):
            table = layouts.table(kind, core.elf.bytes_of(section), section.entry)
            field = table.dtype.fields["exception"][1]
            for at in np.flatnonzero(table["exception"]):
                struct.pack_into("<I", data, section.offset + at * section.entry + field, number)
    return Core(memoryview(bytes(data)))


@pytest.mark.parametrize("number", [n for n in (*layouts.EXCEPTIONS, 99) if n != layouts.ASSERT])
@pytest.mark.parametrize("name", ["decode-uninitialised", "decode-larger-pool", "xqa-larger-pool"])
def test_only_an_illegal_address_accuses_a_page(name, number):
    """The registers still hold the address of a page that no pool has: it is no evidence here."""
    found = examine.of_core(with_exception(name, number), "x", real_cores.record(name))
    assert found.exception.startswith(f"CUDA_EXCEPTION_{number}:")
    assert found.kernel
    assert (found.page == named(name)) == (number in (1, 10, 14))
    if number in (1, 10, 14):
        return
    assert (found.page, found.pages, found.layer, found.address, found.cause) == (-1,) * 4 + ("",)
    assert "page 3" not in found.verdict
    assert "behind" not in found.verdict
    words = {2: "the stack of a thread", 4: "an instruction", 8: "the address of an instruction"}
    assert words.get(number, "") in found.verdict
    assert found.row >= 0


def test_a_core_without_an_exception_accuses_no_page():
    name = "decode-uninitialised"
    found = examine.of_core(with_exception(name, 0), "x", real_cores.record(name))
    assert found.verdict.startswith("no page is accused: the core dump notes no exception; row 7")
    assert (found.page, found.pages, found.cause) == (-1, -1, "")


@pytest.mark.parametrize("number", layouts.MISALIGNED)
def test_an_address_that_is_not_aligned_is_named_where_it_lies(number, monkeypatch):
    """The map is that of a process in which the address is inside of K."""
    name = "decode-uninitialised"
    core = with_exception(name, number)
    told = real_cores.truth(name)
    k = next(r for r in real_cores.memory(name).kv if (r.layer, r.part, r.pool) == (3, "K", "swa"))
    address = told["expected_k"]
    around = dataclasses.replace(k, start=address - 5 * k.page_bytes)
    whole = real_cores.record(name, memory=MemoryMap((around,), segments=True))
    found = examine.of_core(core, "x", whole)
    assert "a mapped address that is not aligned" in found.verdict  # its lanes' are multiples of 16
    registers = Core.registers

    def shifted(self, warp):
        values = registers(self, warp)
        values[:, 24] += 6  # the low half of the address that the instruction takes
        return values

    monkeypatch.setattr(Core, "registers", shifted)
    found = examine.of_core(core, "x", whole)
    assert f"most likely address {address + 6:#x}, which is no multiple of 4" in found.verdict
    assert "it is page 5 of K of layer 3 (swa pool), token 0" in found.verdict
    assert "behind" not in found.verdict
    assert found.address == address + 6
    assert found.page == found.pages == -1
    assert "64 of the 64 lanes that faulted have such an address" in found.notes[-1]


@pytest.mark.parametrize("name", ATTENTION)
def test_with_another_map_no_page_is_named(name):
    """The map of another process: none of the kernel's buffers is in it."""
    other = next(n for n in ATTENTION if n != name)
    found = autopsy(name, memory=real_cores.memory(other))
    assert found.pages == -1, found
    assert "most likely" not in found.verdict


@pytest.mark.parametrize("name", [n for n in ATTENTION if n not in LOST])
def test_a_cause_is_no_more_certain_than_its_page(name):
    """Without the dump's events, only the distance tells the buffer of some of them."""
    found = autopsy(name)
    likely = "most likely" in found.verdict
    assert found.cause.startswith("most likely: ") == likely
    assert any(f"{found.agree} of the {found.lanes} lanes that faulted" in n for n in found.notes)
    assert any("only the distance tells" in n for n in found.notes) == likely


def test_a_page_that_not_all_lanes_have_is_said_so(monkeypatch):
    """In the verdict, which is what is read first, and in the cause."""
    whole = votes.vote

    def some(agree, outside):
        def vote(*args):
            return dataclasses.replace(whole(*args), agree=agree, outside=outside)

        monkeypatch.setattr(votes, "vote", vote)
        return autopsy("decode-uninitialised")

    page = f"page {named('decode-uninitialised')} of K, layer 3"
    found = some(40, 64)
    assert found.verdict.startswith(f"by 40 of the 64 lanes that faulted: {page}")
    assert found.cause.startswith("for 40 of the 64 lanes: the index is")
    assert "of the other lanes, 24 hold an address there that is outside" in " ".join(found.notes)
    for agree, outside in ((1, 1), (30, 64)):
        found = some(agree, outside)
        assert found.verdict.startswith(
            f"by {agree} of the 64 lanes that faulted: most likely {page}"
        )
        assert found.cause.startswith("most likely: the index is")
    assert autopsy("decode-larger-pool").cause.startswith("most likely: page 384 is in the full")


@pytest.mark.parametrize("name", real_cores.NAMES)
def test_each_image_is_opened_once(name, monkeypatch):
    """A server's core dump has hundreds of megabytes of them."""
    opened, elf = [], images.Elf
    monkeypatch.setattr(images, "Elf", lambda data: opened.append(data) or elf(data))
    autopsy(name)
    core = Core(memoryview(real_cores.core(name)))
    assert 0 < len(opened) <= len(list(core.images()))


def test_a_page_of_the_full_pool_in_the_swa_pool_is_told():
    found = autopsy("decode-larger-pool")
    assert "page 384 is in the full pool (1024 pages) and not in the SWA pool" in found.cause
    assert "fits a table that was not translated" in found.cause
    assert "the largest int32" in autopsy("decode-uninitialised").cause
    assert "all its bits are set" in autopsy("xqa-uninitialised").cause


def test_what_only_the_distance_tells_is_said_to_be_likely():
    found = autopsy("decode-larger-pool")
    assert found.verdict.startswith("most likely page 384 of K, layer 2 ")
    assert any("only the distance" in n and "page 896 of V, layer 2" in n for n in found.notes)
    given = PageEvent(6, "alloc", "full", (384,), 1, "request-5")
    known = autopsy("decode-larger-pool", allocator=(given,))
    assert "most likely" not in known.verdict
    assert any("events gave page 384 to the request, and no other" in note for note in known.notes)
    other = dataclasses.replace(given, pages=(896,))
    assert "page 896 of V, layer 2" in autopsy("decode-larger-pool", allocator=(other,)).verdict
    both = dataclasses.replace(given, pages=(384, 896), count=2)
    assert "most likely" in autopsy("decode-larger-pool", allocator=(both,)).verdict
    # Here no lane has it where the instruction takes it from, nor the page's number.
    other = autopsy("xqa-larger-pool")
    assert other.verdict.startswith("most likely page 384 of K, layer 2 ")
    assert any("page 896 of V, layer 2" in note for note in other.notes)
    sure = autopsy("decode-uninitialised")
    assert "most likely" not in sure.verdict


def test_the_history_of_page_and_request_comes_from_the_dump():
    events = (
        PageEvent(5, "alloc", "full", (384,), 1, "request-5"),
        PageEvent(6, "free", "full", (9,), 1, "request-2"),
    )
    found = autopsy("decode-larger-pool", allocator=events)
    assert found.history[0] == "step 5: alloc of 1 page (384) of full for request-5"
    assert found.history[-1] == "step 7 (DECODE): row 5 of 8, tokens 300"


def test_an_assertion_has_no_address():
    found = autopsy("embedding")
    assert "an assertion in the kernel failed; no address is in play" in found.verdict
    assert "indexSelect" in found.kernel
    assert "index_elementwise_kernel" in autopsy("indexing").kernel


def test_a_kernel_without_lines_and_whose_warps_have_ended_is_named():
    found = autopsy("foreign")
    assert found.kernel == "foreign_scatter"
    assert found.line == ""
    assert found.address == -1
    assert "the warps that faulted had ended, so no register tells the address" in found.notes
    assert "most likely not a KV page: the kernel was given no KV buffer, but buffer out" in (
        found.verdict
    )
    assert any(
        "a pointer in memory or in a descriptor is not followed" in note for note in found.notes
    )


def test_a_kernel_that_was_given_kv_is_not_called_innocent():
    """Its parameter points into the middle of a buffer of K, of which it is not the begin."""
    memory = real_cores.memory("foreign")
    out = next(r for r in memory.ranges if r.name == "out")
    k = next(r for r in memory.kv if (r.layer, r.part) == (3, "K"))
    whole = dataclasses.replace(k, start=out.start - k.page_bytes)
    for pages in (True, False):  # a buffer whose pages are not known is KV, too
        kv = whole if pages else dataclasses.replace(whole, page_bytes=0)
        rest = [r for r in memory.ranges if r.name not in ("out", k.name)]
        other = dataclasses.replace(memory, ranges=(kv, *rest))
        found = autopsy("foreign", memory=other)
        assert "the kernel was given K of layer 3" in found.verdict
        assert "not a KV page" not in found.verdict


def test_parameters_that_point_nowhere_say_nothing_of_the_page():
    found = autopsy("foreign", memory=real_cores.memory("decode-graph"))
    assert "no parameter of the kernel points into memory that the map knows" in found.verdict
    assert "not a KV page" not in found.verdict


@pytest.mark.parametrize("major", [0, 10, 12])
def test_instructions_of_another_architecture_are_not_taken_apart(major):
    """The same bits may be another instruction there, and its registers no address."""
    data = bytearray(real_cores.core("decode-uninitialised"))
    core = Core(memoryview(bytes(data)))
    assert core.architectures == {9}
    (devices,) = core.elf.of_type(layouts.DEVICES)
    rows = layouts.table(layouts.DEVICES, core.elf.bytes_of(devices), devices.entry)
    at = devices.offset + rows.dtype.fields["sm_major"][1]
    struct.pack_into("<I", data, at, major)
    found = examine.of_core(Core(memoryview(data)), "x", real_cores.record("decode-uninitialised"))
    assert "does not know the instructions of that device" in " ".join(found.notes)
    assert not any("in registers R" in note for note in found.notes)
    # All lanes have the address in some registers, and the page's number, too.
    assert found.page == named("decode-uninitialised")
