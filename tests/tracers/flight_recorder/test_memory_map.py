"""The memory map of real KV pools and a real backend: each address leads back to its page."""

from __future__ import annotations

import dataclasses
import itertools
import time
from types import SimpleNamespace

import pytest
import releases
import torch
from real_backend import Rig, capture_graph

from g4debug.findings import memory_map
from g4debug.findings.memory_map import GIVEN_BACK, KV, SEGMENT, MemoryMap, MemoryRange
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import memory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU engine")
PAGE = 64


@pytest.fixture
def pool(sglang):
    return releases.swa_pool(10 * PAGE, 4 * PAGE, PAGE, 16, sliding=[0, 1, 3], whole=[2, 5])


def test_each_tokens_address_is_its_page_and_token(pool):
    ranges = list(memory.kv_buffers(pool, "target"))
    found = memory_map.make(ranges, memory.MOST, 7, "cpu", False)
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
    found = memory_map.make(both, memory.MOST, 0, "cpu", False)
    assert len(found.ranges) == len(both) // 2
    assert {r.runner for r in found.ranges} == {"target"}


def test_a_dump_has_room_for_the_largest_and_says_what_is_missing():
    kv = MemoryRange(100, 50, KV, page_bytes=10, page_size=1)
    rest = [MemoryRange(1000 * n, n, "weights") for n in range(1, 8)]
    found = memory_map.make([*rest, kv], 3, 0, "cpu", False)
    assert found.left_out == 4
    assert [r.nbytes for r in found.ranges] == [50, 5, 6, 7]


def test_a_segment_that_was_given_back_is_remembered():
    old = MemoryMap((MemoryRange(1000, 100, SEGMENT, "KV"), MemoryRange(5000, 10, SEGMENT, "free")))
    new = MemoryMap((MemoryRange(1000, 100, SEGMENT, "KV"),))
    found = memory._with_given_back(new, old)
    assert [(r.what, r.name) for r in found.at(5004)] == [(GIVEN_BACK, "free")]
    assert memory._with_given_back(new, found) == found
    again = dataclasses.replace(new, ranges=old.ranges)
    assert memory._with_given_back(again, found) == again


def test_the_static_page_tables_of_a_real_backend_are_in_the_map(arm):
    arm(G4DEBUG_TRACE="flight-recorder")
    rig = Rig()
    rig.admit("a", 50)
    backend = rig.backend()
    batch = rig.batch("decode", rig.requests[-1:], backend)
    backend.init_cuda_graph_state(8, 8)
    capture_graph(backend, batch)
    found = memory_map.make(memory._backend(backend, "target"), memory.MOST, 0, "cpu", False)
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
    """10,000 segments, 5,000 ranges: to look at each pair took more than 1 s."""
    size = 2 << 20
    segments = [
        {"address": n * size, "total_size": size, "allocated_size": n % 3} for n in range(1, 10_001)
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    kv = [MemoryRange(n * size + 512, 1000, KV) for n in range(1, 10_001, 4)]
    weights = [MemoryRange(n * size, 512, "weights") for n in range(1, 10_001, 4)]
    begin = time.perf_counter()
    found = memory._segments(kv, weights)
    assert time.perf_counter() - begin < 0.5
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
    monkeypatch.setattr(memory, "changed", lambda: next(counts))
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
