"""The memory map of real KV pools and a real backend: each address leads back to its page."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import json
import time
from types import SimpleNamespace

import pytest
import releases
import torch
from black_boxes import step
from real_backend import Rig, capture_graph

from g4debug.findings import black_box, memory_map
from g4debug.findings.memory_map import GIVEN_BACK, KV, SEGMENT, MemoryMap, MemoryRange
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import memory
from g4debug.tracers.flight_recorder.tracer import FlightRecorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU engine")
PAGE = 64


@pytest.fixture
def pool(sglang):
    return releases.swa_pool(10 * PAGE, 4 * PAGE, PAGE, 16, sliding=[0, 1, 3], whole=[2, 5])


def test_each_tokens_address_is_its_page_and_token(pool):
    ranges = list(memory.kv_buffers(pool, "target"))
    found = memory_map.make(ranges, 7, "cpu", False)
    assert {(r.pool, r.layer) for r in found.kv} == {
        ("swa", 0), ("swa", 1), ("swa", 3), ("full", 2), ("full", 5),
    }  # fmt: skip
    for layer, name in ((0, "swa"), (3, "swa"), (2, "full"), (5, "full")):
        for part, buffer in (
            ("K", pool.get_key_buffer(layer)),
            ("V", pool.get_value_buffer(layer)),
        ):
            for page, token in ((0, 0), (3, 17), (4, 63)):
                address = buffer[page * PAGE + token].data_ptr() + 5
                (r,) = found.at(address)
                assert (r.pool, r.layer, r.part) == (name, layer, part)
                assert r.page_at(address) == (page, token)
                assert r.pages == len(buffer) // PAGE


def test_what_is_behind_and_in_front_of_a_buffer_has_a_page_too(pool):
    r = next(memory.kv_buffers(pool, "target"))
    assert r.page_at(r.end) == (r.pages, 0)
    assert r.page_at(r.start - 1) == (-1, PAGE - 1)


def test_the_draft_that_reads_the_targets_pool_adds_nothing(pool):
    both = [*memory.kv_buffers(pool, "target"), *memory.kv_buffers(pool, "draft")]
    found = memory_map.make(both, 0, "cpu", False)
    assert len(found.ranges) == len(both) // 2
    assert {r.runner for r in found.ranges} == {"target"}


MB = 1 << 20
INDEXES = {
    "page table": 24, "token list": 24, "req_to_token": 1, "mapping": 1,
}  # fmt: skip


def of_a_server(segments: int) -> list[MemoryRange]:
    """60 layers with K and V, small index buffers, 93 weights, 150 more buffers, and segments."""
    found = []

    def add(count, nbytes, what, name, **more):
        for n in range(count):
            # 1 GiB apart, so that none touches another one
            start = (1 << 46) + (len(found) << 30)
            found.append(MemoryRange(start, nbytes, what, name.format(n), **more))

    for part in ("K", "V"):
        add(
            60, 256 * MB, KV, f"{part.lower()}_buffer", pool="full", runner="target", layer=59,
            part=part, dtype="bfloat16", page_bytes=32768, page_size=64,
        )  # fmt: skip
    for what, count in INDEXES.items():
        name = "TRTLLMHAAttnBackend.decode_cuda_graph_metadata[{}].swa_page_table"
        add(count, 1000, what, name, runner="target", dtype="int32")
    add(93, 50 * MB, "weights", "layers.{}", runner="target", dtype="bfloat16")
    add(150, 4096, "attention buffer", "TRTLLMHAAttnBackend.step[{}]", runner="draft")
    for nbytes in (2 * MB, 300 * MB):
        add(segments // 2, nbytes, SEGMENT, "a CUDA graph's private pool and buffers and KV")
    return found


def test_index_buffers_keep_their_place_beside_300_segments():
    """Of 192 places for the largest, segments and weights took all on two H100."""
    ranges = of_a_server(300)
    found = memory_map.make(ranges, 7, "cuda:0", True)
    kept = collections.Counter(r.what for r in found.ranges)
    assert {what: kept[what] for what in INDEXES} == INDEXES
    assert kept[KV] == 120
    assert kept["weights"] >= memory_map.SHARES["weights"]
    assert kept[SEGMENT] >= memory_map.SHARES[SEGMENT]
    assert len(found.ranges) == 120 + sum(memory_map.SHARES.values())
    # Each address of a segment is known to be mapped, also of one that has no range of its own.
    assert found.segments
    for r in ranges:
        if r.what == SEGMENT:
            assert [at.what for at in found.at(r.end - 1)] == [SEGMENT]
    (bare,) = found.at(found.bare[0])
    assert bare.name == "what had no room in the map"
    without = [r for r in ranges if r.what != SEGMENT and not found.at(r.start)]
    assert len(without) == found.left_out > 0


def test_too_many_segments_make_no_map_that_claims_to_have_all():
    found = memory_map.make(of_a_server(2000), 7, "cuda:0", True)
    assert not found.segments
    assert len(found.bare) == 2 * memory_map.MOST_BARE
    touching = [MemoryRange((1 << 46) + n * MB, MB, SEGMENT, str(n)) for n in range(2000)]
    found = memory_map.make(touching, 7, "cuda:0", True)
    assert found.segments
    assert all(found.at((1 << 46) + n * MB) for n in range(2000))


def test_weights_that_touch_are_one_range_where_not_all_have_room():
    many = [
        MemoryRange((1 << 46) + n * 1024, 1000, "weights", f"layers.{n}", runner="target")
        for n in range(400)
    ]
    (found,) = memory_map.make(many, 0, "cpu", False).ranges
    assert (found.name, found.end) == ("layers.0 to layers.399", many[-1].end)
    assert len(memory_map.make(many[:50], 0, "cpu", False).ranges) == 50
    apart = [dataclasses.replace(r, start=r.start + n * 4096) for n, r in enumerate(many)]
    found = memory_map.make(apart, 0, "cpu", False)
    assert len(found.ranges) + found.left_out == 400


def test_a_segment_that_was_given_back_is_remembered():
    old = MemoryMap((MemoryRange(1000, 100, SEGMENT, "KV"), MemoryRange(5000, 10, SEGMENT, "free")))
    new = MemoryMap((MemoryRange(1000, 100, SEGMENT, "KV"),), segments=True)
    found = memory._with_given_back(new, old)
    assert [(r.what, r.name) for r in found.at(5004)] == [(GIVEN_BACK, "free")]
    assert memory._with_given_back(new, found) == found
    again = dataclasses.replace(new, ranges=old.ranges)
    assert memory._with_given_back(again, found) == again


def test_a_segment_that_is_a_part_of_another_or_had_no_room_was_not_given_back():
    old = MemoryMap((MemoryRange(1000, 100, SEGMENT, "KV"), MemoryRange(5000, 10, SEGMENT, "free")))
    new = MemoryMap((MemoryRange(900, 400, SEGMENT, "KV"),), segments=True, bare=(5000, 5010))
    assert memory._with_given_back(new, old) == new
    lacks = dataclasses.replace(new, segments=False, bare=())
    assert memory._with_given_back(lacks, old) == lacks


def test_the_static_page_tables_of_a_real_backend_are_in_the_map(arm):
    arm(G4DEBUG_TRACE="flight-recorder")
    rig = Rig()
    rig.admit("a", 50)
    backend = rig.backend()
    batch = rig.batch("decode", rig.requests[-1:], backend)
    backend.init_cuda_graph_state(8, 8)
    capture_graph(backend, batch)
    found = memory_map.make(memory._backend(backend, "target"), 0, "cpu", False)
    metadata = backend.forward_metadata
    for name in ("page_table", "swa_page_table"):
        (r, *_) = found.at(getattr(metadata, name).data_ptr())
        assert r.what == "page table", (name, r)
    (rows,) = found.at(rig.req_to_token.req_to_token.data_ptr())
    assert rows.name.endswith("req_to_token")


@pytest.mark.parametrize("steps", [False, True])
def test_the_static_page_tables_of_a_draft_are_in_the_map(arm, steps):
    """Its own steps have another backend than ``attn_backend``, or one for each step."""
    arm(G4DEBUG_TRACE="flight-recorder")
    rig = Rig()
    rig.admit("a", 50)
    backend, other = rig.backend(), rig.backend()
    batch = rig.batch("decode", rig.requests[-1:], backend)
    backend.init_cuda_graph_state(8, 8)
    capture_graph(backend, batch)
    runner = SimpleNamespace(
        is_draft_worker=True,
        attn_backend=other,
        draft_attn_backend=SimpleNamespace(attn_backends=[backend]) if steps else backend,
    )
    found = memory.make(SimpleNamespace(), [runner, SimpleNamespace()], 0)
    for name in ("page_table", "swa_page_table"):
        (r, *_) = found.at(getattr(backend.forward_metadata, name).data_ptr())
        assert (r.what, r.runner) == ("page table", "draft"), (name, r)


def test_many_segments_do_not_keep_the_next_request_waiting(monkeypatch):
    """100,000 segments, 50,000 ranges: to look at each pair would take minutes."""
    size = 2 << 20
    segments = [
        {"address": n * size, "total_size": size, "allocated_size": n % 3}
        for n in range(1, 100_001)
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    kv = [MemoryRange(n * size + 512, 1000, KV) for n in range(1, 100_001, 4)]
    weights = [MemoryRange(n * size, 512, "weights") for n in range(1, 100_001, 4)]
    begin = time.process_time()
    found = memory._segments(kv, weights)
    assert time.process_time() - begin < 30
    names = {r.name for r in found}
    assert names == {
        "KV and weights",
        "KV and free and weights",
        "free",
        "workspace and activations",
    }


def test_a_map_that_takes_long_is_made_rarely(monkeypatch):
    now = [1000.0]
    watch = memory.MemoryWatch(Context.alone("flight-recorder", Settings()), None)
    watch.map = MemoryMap(())
    counts = itertools.count()
    monkeypatch.setattr(memory, "changed", lambda device: next(counts))
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    made = []

    def make():
        made.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(watch, "_make", make)
    watch.before_idle()
    now[0] += 100
    watch.before_idle()
    assert len(made) == 1
    now[0] += 200
    watch.before_idle()
    assert len(made) == 2


class Allocator:
    """PyTorch's: its segments, by address, and how many it has ever got or given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: int) -> None:
        self.addresses, self.count, self.asked = set(addresses), 0, 0
        self.device: int | None = None
        self.dead = False
        monkeypatch.setattr(memory, "uses_cuda", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_stats", self._stats)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self._snapshot)

    def change(self, get: int, give_back: int = 0) -> None:
        self.addresses = self.addresses - {give_back} | {get}
        self.count += 1

    def _stats(self, device: int | None) -> dict[str, int]:
        self.device = device
        return {"segment.all.allocated": self.count}

    def _snapshot(self) -> list[dict[str, int]]:
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.asked += 1
        return [
            {"address": at, "total_size": 2 * MB, "allocated_size": MB} for at in self.addresses
        ]


HELD = MemoryRange(1 << 40, MB, KV, "k_buffer", "swa", page_bytes=65536, page_size=64)
FIRST, SECOND = 1 << 40, 1 << 41


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch, FIRST)


@pytest.fixture
def watch(allocator):
    """On a server that is never idle, with the map of its start."""
    told = []
    watch = memory.MemoryWatch(
        Context.alone("flight-recorder", Settings()), None, lambda: told.append(watch.last())
    )
    watch.map = memory_map.make([HELD, *memory._segments([HELD], [])], 0, "cuda:3", True)
    watch.map = dataclasses.replace(watch.map, left_out=2)
    watch._state = memory.changed(3)
    watch.told = told
    return watch


def test_a_dump_of_a_busy_server_has_the_segments_of_its_own_time(watch, allocator):
    """A segment that PyTorch got since the last idle moment was "in no buffer and no segment"."""
    watch.context.recorder.step = 9
    assert watch.last() is watch.map
    assert (allocator.asked, allocator.device) == (1, 3)
    allocator.change(SECOND, give_back=FIRST)
    found = watch.last()
    assert [r.what for r in found.at(SECOND)] == [SEGMENT]
    assert [r.what for r in found.at(HELD.end + 4096)] == [GIVEN_BACK]
    assert found.kv == (HELD,)
    assert (found.segments, found.step, found.device, found.left_out) == (True, 9, "cuda:3", 2)
    assert watch.last() is found
    assert allocator.asked == 2


def test_a_map_whose_segments_cannot_be_asked_for_says_so(watch, allocator, caplog):
    allocator.change(SECOND)
    allocator.dead = True
    found = watch.last()
    assert not found.segments
    assert found.ranges == watch.map.ranges
    assert "the memory map may lack segments" in caplog.text
    allocator.dead = False
    assert watch.last().segments


def test_another_thread_never_asks_the_allocator(watch, allocator):
    """The main thread may hold its lock, and wait for a device that hangs."""
    allocator.change(SECOND)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(watch.last).result() is watch.map
        watch.look()
        assert not thread.submit(watch.last).result().segments
    assert allocator.asked == 1


def test_the_black_box_of_a_busy_server_says_that_segments_were_got(watch, allocator):
    """Told once, and without a snapshot, which a busy server would wait for."""
    watch.look()
    assert watch.told == []
    allocator.change(SECOND)
    watch.look()
    allocator.change(SECOND + 2 * MB)
    watch.look()
    (told,) = watch.told
    assert told.ranges == watch.map.ranges
    assert not told.segments
    assert allocator.asked == 1


def test_the_box_of_a_busy_server_is_told_within_a_second(allocator, tmp_path, monkeypatch):
    monkeypatch.setattr(black_box.BlackBox.__init__, "__defaults__", (tmp_path, False))
    recorder = FlightRecorder(
        Context.alone("flight-recorder", Settings(debug_dir=tmp_path / "dumps"))
    )
    recorder.install()
    boxing = recorder.boxing
    boxing.begin()
    monkeypatch.setattr(memory, "make", lambda *_: memory_map.make([HELD], 0, "cuda:3", True))
    boxing.look.__self__.after_scheduler_init(None)

    def told():
        blobs = black_box.content(boxing.box.path.read_bytes()).blobs
        return json.loads(blobs["about"])["dump"]["memory"]["segments"]

    try:
        second = 10**9
        boxing.step(*step(1), 5 * second)
        assert told()
        allocator.change(SECOND)
        boxing.step(*step(2), 5 * second + second // 2)
        assert told()
        boxing.step(*step(3), 6 * second)
        assert not told()
    finally:
        boxing.remove()
