"""What the autopsy says of a page, of an address, and of a row: no core dump is needed."""

from __future__ import annotations

import dataclasses

import pytest
import real_cores

from g4debug.autopsy import examine, places, rows, story
from g4debug.autopsy.core import Core
from g4debug.autopsy.votes import Pointer, Vote
from g4debug.backends import adapters
from g4debug.findings.memory_map import GIVEN_BACK, KV, SEGMENT, MemoryMap, MemoryRange
from g4debug.findings.record import Autopsy, Finding, Held, Location, PageEvent, Step, TrapRecord
from g4debug.triage.entry import entries

pytestmark = pytest.mark.once("a core is read without SGLang")

GB = 1 << 30


def kv(start, pages, pool="swa", layer=0, part="K", runner="target"):
    return MemoryRange(
        start, pages * 32768, KV, pool=pool, layer=layer, part=part, runner=runner,
        page_bytes=32768, page_size=64,
    )  # fmt: skip


SWA, FULL = kv(1000 * GB, 373), kv(1001 * GB, 4000, "full", 5)
LONE = kv(1005 * GB, 100, "full", 9)
MAP = MemoryMap(
    (
        SWA,
        FULL,
        MemoryRange(1002 * GB, GB, SEGMENT, "weights"),
        MemoryRange(1002 * GB, GB // 2, "weights", "layers.3", runner="target"),
        MemoryRange(1004 * GB, GB, GIVEN_BACK, "KV"),
        LONE,
        MemoryRange(LONE.start, LONE.nbytes + GB // 2, SEGMENT, "KV"),
    ),
    segments=True,
)


def record(**fields):
    finding = Finding("flight-recorder", "cuda-error", "", "g4debug: died", Location(), "", "")
    return TrapRecord(finding, "", memory=MAP, **fields)


@pytest.mark.parametrize(
    ("page", "token", "said"),
    [
        (384, 0, "page 384 is in the full pool (4000 pages) and not in the SWA pool (373 pages)"),
        (-1, 63, "the index is negative"),
        (0x7FFF_FFFF, 0, "0x7fffffff, the largest int32"),
        (0x7FFF_FFFF // 64, 63, "0x7fffffff, the largest int32"),
        (10_000_000, 0, "no pool has a page 10000000"),
        (5000, 0, ""),  # neither a page of any pool, nor so far away that it must be junk
    ],
)
def test_a_cause_is_told_only_where_the_numbers_fit(page, token, said):
    found, fits = story.cause(SWA, page, token, record())
    assert said in found
    assert bool(said) == bool(found)
    wrong, untranslated = entries()[17].title, entries()[1].title
    assert fits == (() if not said else (wrong, untranslated) if page == 384 else (wrong,))


def test_a_full_page_in_a_full_pool_is_no_missed_translation():
    assert story.cause(FULL, 384, 0, record()) == ("", ())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (SWA.start + 5 * 32768 + 512 * 3, "page 5 of K of layer 0 (swa pool), token 3"),
        (SWA.end + 11 * 32768, "behind K of layer 0 (swa pool): page 384, token 0"),
        (SWA.start - 1, "in front of K of layer 0 (swa pool): page -1, token 63"),
        (1002 * GB + 4096, "not a KV page: in weights layers.3 of the target, 4.0 KiB from"),
        (
            1002 * GB + GB - 1,
            "not a KV page: in PyTorch's memory: a segment of 1.0 GiB with weights",
        ),
        (1004 * GB + 1, "not mapped any more: in memory that was given back to CUDA"),
        (1003 * GB + 7, "in no buffer and no segment"),
        (
            LONE.end + 32768,
            "page 101, token 0, where it has pages 0 to 99; still in the same segment",
        ),
    ],
)
def test_an_address_in_words(address, said):
    assert said in places.words(address, MAP)


def test_all_kv_pages_of_an_address_that_was_rounded_down_are_told():
    small = dataclasses.replace(SWA, page_bytes=1024, page_size=1, nbytes=373 << 10)
    memory = MemoryMap((small,), segments=True)
    assert "page 4 of K" in places.words(small.start + 4096, memory)
    assert "pages 4 to 7 of K of layer 0 (swa pool); it has pages 0 to 372" in places.words(
        small.start + 4096, memory, 4096
    )
    behind = places.words(small.start + (400 << 10), memory, 4096)
    assert "pages 400 to 403, where it has pages 0 to 372" in behind


def test_the_row_is_that_of_each_kernels_grid():
    for adapter in adapters():
        for kernel, axis in adapter.kernels.items():
            assert rows.row_of(kernel, (4, 5, 6), "bfloat16") == 4 + "xyz".index(axis)
    assert rows.row_of("gather", (4, 5, 6), "bfloat16") == -1
    assert rows.row_of("kernel_mha", (4, 5, 6), "float8_e4m3fn") == -1


def test_a_request_is_named_only_if_the_last_steps_agree():
    same = (Step(6, "DECODE", ("a", "b"), (1, 1)), Step(7, "DECODE", ("a", "c", "d"), (2, 2, 2)))
    assert rows.request_of(0, same) == "a"
    assert rows.request_of(1, same) == ""
    # In step 6, row 2 may have been padding of a CUDA graph. A prefill has no such rows.
    assert rows.request_of(2, same) == ""
    prefill = (Step(6, "EXTEND", ("a",), (1,)), same[1])
    assert rows.request_of(2, prefill) == "d"
    assert rows.request_of(0, prefill) == "a"
    assert rows.request_of(2, same[1:]) == "d"
    assert rows.request_of(3, same) == ""
    assert rows.request_of(-1, same) == ""
    assert rows.request_of(0, ()) == ""


def test_a_row_of_a_drafts_tree_is_nobodys():
    assert rows.may_be_branches(record(arguments={"speculative_eagle_topk": 4}))
    assert not rows.may_be_branches(record(defaults={"speculative_eagle_topk": 1}))
    assert not rows.may_be_branches(record())
    name = "decode-larger-pool"
    core = Core(memoryview(real_cores.core(name)))
    found = examine.of_core(
        core, "x", real_cores.record(name, arguments={"speculative_eagle_topk": 4})
    )
    assert (found.row, found.request) == (-1, "")
    assert any("branch of the draft's tree" in note for note in found.notes)
    assert "row" not in found.verdict


def test_a_row_behind_the_requests_may_be_padding():
    core = Core(memoryview(real_cores.core("decode-larger-pool")))
    for count, said in ((0, "at most 0 requests: the row may be padding"), (8, "")):
        found = examine.of_core(core, "x", real_cores.record("decode-larger-pool", rows=count))
        assert found.row >= 0
        assert bool(found.request) == (not said)
        assert any(said in note for note in found.notes)


def test_the_map_of_another_process_is_not_used():
    core = Core(memoryview(real_cores.core("decode-larger-pool")))
    finding = Finding("flight-recorder", "", "", "", Location(pid=5), "", "")
    of = dataclasses.replace(real_cores.record("decode-larger-pool"), finding=finding)
    other = examine.of_core(core, "g4debug-core-node-7-6-1790000000.nvcudmp", of)
    assert "the core is of process 6, the dump of 5: its map is not used" in other.notes
    assert other.layer == -1
    assert examine.of_core(core, "g4debug-core-node-7-5-1790000000.nvcudmp", of).layer >= 0


def test_the_map_of_the_same_process_id_of_another_host_is_not_used():
    core = Core(memoryview(real_cores.core("decode-larger-pool")))
    told = {"CUDA_COREDUMP_FILE": "…/g4debug-core-%h-0a1b2c3d-%p-%t.nvcudmp"}
    of = dataclasses.replace(
        real_cores.record("decode-larger-pool"),
        finding=Finding("flight-recorder", "", "", "", Location(pid=5), "", ""),
        environment=told,
    )
    other = examine.of_core(core, "g4debug-core-node-7-ffffffff-5-1790000000.nvcudmp", of)
    assert (other.layer, other.page) == (-1, -1)
    assert (
        "the core is of another host or container than the dump: its map is not used" in other.notes
    )
    own = "g4debug-core-node-7-0a1b2c3d-5-1790000000.nvcudmp"
    for name in (own, "core.renamed"):
        assert examine.of_core(core, name, of).layer >= 0


def test_innocence_is_only_likely_where_the_kernel_reads_kv():
    address = SWA.end + (1 << 45)
    memory = dataclasses.replace(MAP, step=7)
    vote = Vote(32, 32, 32, True, address)
    whole, half = Pointer(SWA.start, SWA), Pointer(SWA.start + SWA.nbytes // 2, None)
    for among, said in (
        ([whole], "most likely not a KV page: "),
        ([half], "most likely not a KV page: "),
        (
            [Pointer(1002 * GB, None)],
            f"not a KV page: address {address:#x} is in no buffer and no segment of the map of s",
        ),
    ):
        found = examine._innocent(Autopsy("x", ""), vote, among, memory, [])
        assert found.where.startswith(said)


def test_innocence_is_no_more_certain_than_the_lanes():
    address = 1003 * GB
    among = [Pointer(1002 * GB, None)]
    for agree, outside, said in (
        (32, 32, "not a KV page: address"),
        (20, 32, "by 20 of the 32 lanes that faulted: not a KV page: address"),
        (20, 20, "by 20 of the 32 lanes that faulted: not a KV page: address"),
        (10, 32, "by 10 of the 32 lanes that faulted: most likely not a KV page: address"),
        (1, 1, "by 1 of the 32 lanes that faulted: most likely not a KV page: address"),
    ):
        vote = Vote(32, agree, outside, True, address)
        found = examine._innocent(Autopsy("x", ""), vote, among, MAP, [])
        assert found.verdict.startswith(said)
        assert found.where.removeprefix("most likely ").startswith("not a KV page")


def test_what_the_allocator_did_with_the_page_is_told():
    events = (
        PageEvent(3, "alloc", "full", (384, 385), 2, "request-3", "schedule_batch.py:10 f"),
        PageEvent(4, "free", "full", (7,), 1, "request-1"),
    )
    told = list(story.history(SWA, 384, "", record(allocator=events)))
    assert told == [
        "step 3: alloc of 2 pages (384, 385) of full for request-3 by schedule_batch.py:10 f"
    ]
    (line,) = story.history(SWA, 999, "", record(allocator=events))
    assert line == "the dump's 2 last events of the allocator have no page 999"
    events = (*events, PageEvent(5, "alloc", "full", (1, 2), 40, "request-1"))
    (line,) = story.history(SWA, 999, "", record(allocator=events))
    assert line.endswith("have no page 999; 1 of them have more pages than are noted")


def test_what_the_ledger_knows_of_the_pages_holder_is_told():
    """The page was handed out long before the last events of the allocators."""
    events = (PageEvent(9, "free", "full", (7,), 1, "b"),)
    held = (
        Held("full", "a", (10, 12, 384, 384), 4),
        Held("swa", "a", (5, 5), 1),
        Held("full", "b", (20, 29), 10),
        Held("swa", "b", (), 0),
    )
    told = list(story.history(SWA, 384, "a", record(allocator=events, held=held)))
    assert told[:3] == [
        "by the ledger, page 384 of the full pool was handed out for a, the request in that row, "
        "and not freed since",
        "by the ledger, 4 pages of the full pool handed out for a and not freed: 10 to 12, 384",
        "by the ledger, 1 page of the swa pool handed out for a and not freed: 5",
    ]
    told = list(story.history(SWA, 22, "a", record(held=held)))
    assert told[0] == (
        "by the ledger, page 22 of the full pool was handed out for b, and not freed since"
    )
    told = list(story.history(SWA, 3999, "b", record(held=held)))
    assert told[0] == (
        "by the ledger, no request of the last two steps was given a page 3999, of any pool"
    )
    cut = (*held, Held("full", "c", (), 3))
    (first, *_) = story.history(SWA, 3999, "b", record(held=cut))
    assert first.endswith("; they hold more pages than the dump has room for")
    assert not any("ledger" in line for line in story.history(SWA, 22, "a", record()))
    assert list(story.history(SWA, -1, "", record(held=held))) == []


def test_a_dump_of_another_day_is_doubted():
    core = real_cores.core("foreign")
    late = real_cores.record("foreign", created="2026-12-25T00:00:00+00:00")
    found = examine.of_core(Core(memoryview(core)), "x", late)
    assert any("h apart" in note for note in found.notes)
