"""The stand-ins that are a few lines each, against what SGLang's kernels do."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g4debug.cpu import (
    CpuEngineError,
    bonus_tokens,
    cache_locs,
    kv_copy,
    no_device,
    open_port,
    pinned,
    sm100,
    streams,
    thread_binding,
    tree_mask,
    verify_greedy,
)

WIDTH = 12
spans = st.lists(
    st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH)).map(sorted), min_size=1, max_size=5
)


@given(spans=spans, seed=st.integers(0, 999))
def test_slots_are_read_and_written_request_by_request(spans, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 10_000, (8, WIDTH), generator=generator, dtype=torch.int32)
    rows = torch.randperm(8, generator=generator)[: len(spans)]
    start, end = torch.tensor(spans).T
    count = int((end - start).sum())
    want = [
        int(table[row, i])
        for row, (a, b) in zip(rows.tolist(), spans, strict=True)
        for i in range(a, b)
    ]
    slots = torch.full((count,), -1)
    cache_locs.read(rows, table, start, end, slots, WIDTH)
    assert slots.tolist() == want

    blank = torch.zeros_like(table)
    cache_locs.write(rows, blank, start, end, slots, WIDTH)
    inside = torch.zeros_like(table, dtype=torch.bool)
    for row, (a, b) in zip(rows.tolist(), spans, strict=True):
        inside[row, a:b] = True
    assert torch.equal(blank, torch.where(inside, table, 0))


def test_the_slots_after_each_length():
    table = torch.arange(3 * WIDTH, dtype=torch.int32).view(3, WIDTH)
    lengths = torch.tensor([4, 7])
    slots = cache_locs.extend(torch.tensor([2, 0]), table, lengths, lengths + 3, 2, 3, "cpu")
    assert slots.dtype is torch.int64
    assert slots.tolist() == [28, 29, 30, 7, 8, 9]


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), topk=st.integers(1, 3))
def test_the_slots_of_a_draft_that_writes_kv(lengths, topk):
    table = torch.arange(4 * WIDTH, dtype=torch.int32).view(4, WIDTH)
    rows, columns = torch.arange(3, 3 - len(lengths), -1), 2
    slots = torch.full((len(lengths) * topk * columns,), -1)
    cache_locs.draft(rows, table, torch.tensor(lengths), slots, WIDTH, topk, columns)
    assert slots.tolist() == [
        int(table[row, length + i])
        for row, length in zip(rows.tolist(), lengths, strict=True)
        for i in range(topk * columns)
    ]


@given(index=st.lists(st.lists(st.integers(-1, 7), min_size=3, max_size=3), min_size=1, max_size=4))
def test_the_slots_of_accepted_drafts_stand_one_behind_the_other(index):
    slots = torch.arange(50, 58)
    found = torch.zeros(12, dtype=torch.int64)
    cache_locs.accepted(torch.tensor(index), slots, found)
    want = [50 + i for row in index for i in row if i >= 0]
    assert found.tolist() == want + [0] * (12 - len(want))


def test_the_tree_mask_is_the_one_for_gpus(sglang):
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    assert tree_mask.full(None)() == TreeMaskMode.FULL_MASK
    assert not tree_mask.full_of_ngram(True)


def test_a_width_of_another_table_is_refused():
    one = torch.tensor([0])
    for call in (cache_locs.read, cache_locs.write):
        with pytest.raises(ValueError, match="rows of 12 slots and a width of 64"):
            call(one, torch.zeros(1, WIDTH), one, one, one, 64)


def test_the_bonus_token_is_the_last_accepted_one():
    accepted = torch.tensor([[11, 12, 0], [21, 0, 0], [31, 32, 33]], dtype=torch.int32)
    bonus = torch.zeros(3, dtype=torch.int64)
    bonus_tokens.fill(accepted, torch.tensor([2, 1, 3], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [12, 21, 33]


def test_kv_rows_are_read_before_any_is_written():
    buffers = [torch.arange(12.0).view(6, 2), torch.arange(18, dtype=torch.int16).view(6, 3)]
    want = [b.clone() for b in buffers]
    targets, sources = torch.tensor([1, 2, 5]), torch.tensor([2, 1, 0])
    for b in want:
        b[targets] = b[sources]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b[0].nbytes for b in buffers])
    kv_copy.copy(pointers, strides, targets, sources)
    assert all(torch.equal(a, b) for a, b in zip(buffers, want, strict=True))
    with pytest.raises(ValueError, match="zip"):
        kv_copy.copy(pointers, strides, targets, sources[:2])


def test_record_stream_is_nothing_on_a_cpu_and_torchs_own_elsewhere(monkeypatch):
    called = []
    monkeypatch.setattr(streams, "_REAL", lambda tensor, stream: called.append(stream))
    streams.record_stream(torch.zeros(1), "stream")
    assert called == []
    streams.record_stream(torch.zeros(1, device="meta"), "stream")
    assert called == ["stream"]


def test_no_tensor_is_pinned(sglang):
    """Torch refuses it here; a tensor stays what it is."""
    x = torch.arange(3)
    assert pinned.pin_memory(x) is x


def test_there_is_no_device_to_wait_for(sglang):
    """Torch refuses to wait for one here; all else of torch is torch's."""
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.synchronize()
    no_device.TORCH.cuda.synchronize()
    assert no_device.TORCH.cuda.empty_cache is torch.cuda.empty_cache
    assert no_device.TORCH.zeros is torch.zeros


def test_the_platform_is_an_sm100_and_else_the_truth(sglang):
    try:
        from sglang.srt import runtime_context
    except ImportError:
        pytest.skip("this SGLang asks is_sm100_supported() and has no runtime_context")
    if not hasattr(runtime_context, "get_platform"):
        pytest.skip("this SGLang's runtime_context knows no platform")
    platform, real = sm100.get_platform(), runtime_context.get_platform()
    assert platform.is_sm100
    assert not real.is_sm100
    for name in ("is_sm90", "is_sm120", "is_cuda", "is_hip"):
        assert getattr(platform, name) == getattr(real, name)
    with pytest.raises(AttributeError, match="no_such_fact"):
        _ = platform.no_such_fact


def test_verify_takes_the_names_of_sgl_kernel():
    chain = torch.tensor([[0, 1, 2]])
    given = {
        "candidates": torch.tensor([[5, 6, 7]]),
        "target_predict": torch.tensor([[6, 9, 1]]),
    }

    def outputs():
        return {
            "predicts": torch.zeros(3, dtype=torch.int32),
            "accept_index": torch.full((1, 3), -1, dtype=torch.int32),
            "accept_token_num": torch.zeros(1, dtype=torch.int32),
        }

    next_token, next_sibling = torch.tensor([[1, 2, -1]]), torch.tensor([[-1, -1, -1]])
    one, other = outputs(), outputs()
    verify_greedy.verify_tree_greedy(
        **one, **given, retrieve_index=chain, retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
    )  # fmt: skip
    verify_greedy.verify_tree_greedy_cpu(
        **other, **given, retrive_index=chain, retrive_next_token=next_token,
        retrive_next_sibling=next_sibling,
    )  # fmt: skip
    assert one["accept_index"].tolist() == [[0, 1, -1]]
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_each_rank_may_use_the_cores_of_its_process():
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for rank in range(3):  # more than most machines have NUMA nodes
        assert thread_binding.init_threads_binding(numa_index=rank, world_size=3) == cores
        assert thread_binding.init_for_tensor_parallel(tp_rank=rank, tp_size=3) == cores
        runner = SimpleNamespace(tp_rank=rank, tp_size=3)
        thread_binding.init_of_runner(runner)
        assert runner.local_omp_cpuid == cores
    with pytest.raises(CpuEngineError, match="cores of rank 3, and has 3 ranks"):
        thread_binding.init_threads_binding(numa_index=3, world_size=3)


def test_nobody_asks_a_server_before_its_port_is_open():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # a connection is refused until it listens
        host, port = server.getsockname()
        opened: list[float] = []

        def open_late():
            time.sleep(0.3)
            opened.append(time.monotonic())
            server.listen()

        threading.Thread(target=open_late).start()
        asked: list[float] = []
        ask = open_port.awaited(lambda args: asked.append(time.monotonic()))
        ask(SimpleNamespace(url=lambda: f"http://{host}:{port}"))
    assert opened[0] < asked[0]


def test_that_a_port_never_opens_is_for_sglang_to_tell(monkeypatch):
    monkeypatch.setattr(open_port, "PATIENCE", 0.1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host, port = closed.getsockname()

        def ask(args):
            raise ConnectionRefusedError(args.url())

        with pytest.raises(ConnectionRefusedError, match=str(port)):
            open_port.awaited(ask)(SimpleNamespace(url=lambda: f"http://{host}:{port}"))
