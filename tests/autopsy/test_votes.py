"""For which buffer an address was meant: what other lanes hold counts only where it can tell."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from g4debug.autopsy import votes
from g4debug.autopsy.images import Access
from g4debug.autopsy.votes import Pointer
from g4debug.findings.memory_map import KV, SEGMENT, MemoryMap, MemoryRange

pytestmark = pytest.mark.once("a core is read without SGLang")

PAGE = 65536
FAULT, ELSEWHERE = 0x1000, 0x2000  # where lanes stand
LOADS = Access("LDG", 4, 0)


def kv(start: int, part: str) -> MemoryRange:
    return MemoryRange(
        start, 373 * PAGE, KV, pool="swa", layer=22, part=part, page_bytes=PAGE, page_size=64
    )


K = kv(1000 << 30, "K")
V = kv(K.start + 400 * PAGE, "V")
MAP = MemoryMap((K, V, MemoryRange(K.start, 800 * PAGE, SEGMENT)), segments=True)
BAD = K.start + 60_000 * PAGE


def warp(address: int, pc: int = FAULT, faulted: bool = False) -> SimpleNamespace:
    """32 lanes that stand at ``pc`` and hold addresses from ``address`` on in R4 and R5."""
    lanes = np.zeros(32, [("pc", "<u8"), ("exception", "<u4")])
    lanes["pc"], lanes["exception"] = pc, 14 * faulted
    held = np.uint64(address) + np.arange(32, dtype="<u8") * np.uint64(16)
    registers = np.zeros((32, 8), "<u4")
    registers[:, 4], registers[:, 5] = held & np.uint64(0xFFFF_FFFF), held >> np.uint64(32)
    return SimpleNamespace(lanes=lanes, error_pc=FAULT if faulted else -1, registers=registers)


def vote(*others: SimpleNamespace, memory: MemoryMap = MAP, access: Access | None = LOADS):
    warps = [warp(BAD, faulted=True), warp(BAD + 512, faulted=True), *others]
    voters = votes.Voters(SimpleNamespace(registers=lambda w: w.registers), warps)
    return votes.vote(voters, access, [Pointer(K.start, K), Pointer(V.start, V)], memory)


def test_lanes_elsewhere_in_the_kernel_tell_no_buffer():
    """All lanes read K. Others have gone on, and have an address of V in the same registers."""
    found = vote(warp(V.start + 5 * PAGE, pc=ELSEWHERE))
    assert not found.sure
    assert found.inside == 0
    assert {p.buffer for p in (found.base, *found.rivals)} == {K, V}


def test_lanes_at_the_same_instruction_tell_the_buffer():
    for buffer, page in ((K, 60_000), (V, 59_600)):
        found = vote(warp(buffer.start + 5 * PAGE), warp(V.start + 5 * PAGE, pc=ELSEWHERE))
        assert found.sure
        assert found.inside == 32
        assert found.base.buffer is buffer
        assert buffer.page_at(found.address)[0] == page
        assert found.agree == 64


def test_lanes_that_point_into_two_buffers_tell_neither():
    found = vote(warp(V.start), warp(V.start + PAGE), warp(K.start))
    assert not found.sure
    assert found.inside == 0


def test_where_the_instruction_is_not_known_the_nearest_buffer_is_a_guess():
    """The address of a page of K is one of V, too, where the two lie beside each other."""
    found = vote(access=None)
    assert not found.exact
    assert not found.sure
    assert found.base.buffer is V
    assert [p.buffer for p in found.rivals] == [K]
    assert K.page_at(found.address)[0] == 60_000


def test_a_segment_of_which_only_the_place_is_known_is_mapped():
    """The registers have moved on to another buffer, whose segment had no room in the map."""
    assert vote().address == BAD
    bare = dataclasses.replace(MAP, bare=(BAD - PAGE, BAD + PAGE))
    for access in (LOADS, None):
        found = vote(memory=bare, access=access)
        assert (found.address, found.base) == (-1, None)


def test_a_map_without_all_segments_makes_no_vote_certain():
    """The address may be in one that it lacks: then it did not fault."""
    beside = warp(K.start + 5 * PAGE)
    assert vote(beside).sure
    lacks = dataclasses.replace(MAP, segments=False)
    assert not vote(beside, memory=lacks).sure
    assert vote(memory=MAP, access=None).base is not None
    assert vote(memory=lacks, access=None).base is None
    numbered = warp(BAD, faulted=True)
    numbered.registers[:, 0] = 60_000
    assert vote(numbered, memory=lacks).sure


def of_each(*addresses: int) -> SimpleNamespace:
    """A warp that faulted, of which each lane has an address of its own and its page's number."""
    of = warp(0, faulted=True)
    held = np.array(addresses, "<u8")
    of.registers[:, 4], of.registers[:, 5] = held & np.uint64(0xFFFF_FFFF), held >> np.uint64(32)
    of.registers[:, 0] = (held.astype(np.int64) - K.start) // PAGE
    return of


def counted(*addresses: int):
    """The vote of one warp."""
    voters = votes.Voters(SimpleNamespace(registers=lambda w: w.registers), [of_each(*addresses)])
    return votes.vote(voters, LOADS, [Pointer(K.start, K), Pointer(V.start, V)], MAP)


def test_a_single_lane_is_not_enough():
    """One lane that also holds the page's number made the verdict as certain as all 32."""
    inside, bad = [K.start + n * 512 for n in range(32)], [BAD + n * 16 for n in range(32)]
    for count, few in ((1, True), (3, True), (4, False), (32, False)):
        found = counted(*bad[:count], *inside[count:])
        assert (found.lanes, found.agree, found.outside) == (32, count, count)
        assert found.sure
        assert found.few == few
    assert vote(access=None).agree == 64
    assert not vote(access=None).few


def test_lanes_that_hold_other_pages_outside_speak_against_it():
    other = [BAD + (n + 1) * 50 * PAGE for n in range(32)]
    bad = [BAD + n * 16 for n in range(32)]
    for count, few in ((10, True), (15, True), (16, False)):
        found = counted(*bad[:count], *other[count:])
        assert (found.lanes, found.agree, found.outside) == (32, count, 32)
        assert found.few == few


def test_very_many_pointers_and_registers_take_bounded_work(monkeypatch):
    """Each pair of registers has an address, and each of the pointers may be its buffer."""
    looked, numbered = [], votes._numbered
    monkeypatch.setattr(votes, "_numbered", lambda *a: looked.append(len(a[1])) or numbered(*a))
    of = warp(BAD, faulted=True)
    of.registers = np.tile(of.registers[:, 4:6], 100)
    voters = votes.Voters(SimpleNamespace(registers=lambda w: w.registers), [of] * 200)
    many = [kv(K.start + n * 400 * PAGE, "K") for n in range(140)]
    among = [Pointer(b.start, b) for b in many]
    found = votes.vote(voters, None, among, MemoryMap(tuple(many), segments=True))
    assert found.lanes == 200 * 32
    assert 0 < len(looked) <= votes.MOST_LOOKS
    assert max(looked) <= votes.MOST_COMPARED
