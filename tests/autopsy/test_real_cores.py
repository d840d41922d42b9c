"""The autopsy of real core dumps: each names what was broken, and claims nothing beside it."""

from __future__ import annotations

import io

import pytest
import real_cores
from elftools.elf.elffile import ELFFile

from g4debug.autopsy import examine, layouts
from g4debug.autopsy.core import Core


def autopsy(name, **fields):
    return examine.of_core(
        Core(memoryview(real_cores.core(name))), f"{name}.core", real_cores.record(name, **fields)
    )


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
    """A warp's lanes are its threads, and a grid's block is in the grid."""
    core = Core(memoryview(real_cores.core(name)))
    assert core.device.startswith("NVIDIA H")
    assert core.grids
    assert core.warps
    for warp in core.warps:
        grid = core.grids[warp.grid]
        assert all(b < n for b, n in zip(warp.block, grid.size, strict=True))
        assert sorted(warp.lanes["lane"]) == list(range(32))
        registers = core.registers(warp)
        assert registers.shape[0] == 32


@pytest.mark.parametrize("name", [n for n in real_cores.NAMES if "at" in real_cores.truth(n)])
def test_the_page_the_layer_and_the_row_are_named(name):
    told = real_cores.truth(name)
    row, _, layer = told["at"]
    found = autopsy(name)
    assert (found.pool, found.layer) == ("swa", layer), found
    assert found.page == told["value"] // (1 if "pages" in told else told["page_size"]), found
    assert found.row in (row, -1)
    assert found.agree > 0
    assert found.cause


def test_a_source_line_is_named_where_the_image_has_one():
    assert autopsy("gather").line == "oob.py:10"
    assert layouts.exception(14) in autopsy("gather").verdict
