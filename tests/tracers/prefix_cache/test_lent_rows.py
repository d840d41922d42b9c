"""The sums of rows: the kernels, by Triton's interpreter, beside torch; and what they notice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.prefix_cache.lent_rows import (
    BLOCK,
    SLICE,
    LentRows,
    State,
    compare,
    expect,
    slices,
    weights_of_a_slice,
)
from g4debug.tracers.prefix_cache.tracer import LOGGED, ROWS, STATES, PrefixCacheTracer

pytestmark = [
    pytest.mark.once("what it tests is the same code on every release"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here"),
]
NOW = State("r", 32, 7, 0)


class Request:
    """Something that can be referred to weakly."""


WHO = Request()


def row_of(pages: list[int], size: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


@pytest.mark.parametrize("count", [1, 64, BLOCK, BLOCK + 40, SLICE, SLICE + 1, 2 * SLICE + 70])
@pytest.mark.parametrize("wrong", [None, 0, -1])
def test_kernels_and_torch_say_the_same(count, wrong):
    draw = torch.Generator().manual_seed(count)
    slots = torch.randperm(3 * SLICE, generator=draw)[:count]
    table = torch.zeros((4, 2 * SLICE + 100), dtype=torch.int32)
    table[2, :count] = slots.to(torch.int32)
    table[2, count:] = 77  # behind what the prefix cache has, a row says nothing of it
    if wrong is not None:
        table[2, :count][wrong] += 1
    weights, words = weights_of_a_slice(), 1 + slices(table.shape[1])
    found, flags = [], []
    for by_kernel in (False, True):
        expected = torch.zeros((4, words), dtype=torch.int64)
        marks = torch.zeros(4, dtype=torch.int64)
        rows = torch.tensor([3, 2, -1, 99, 0], dtype=torch.int32)  # some of them no rows
        expect(slots, weights, expected, 2, count, by_kernel)
        compare(table, rows, weights, expected, marks, count, by_kernel)
        found.append(expected)
        flags.append(marks)
    assert torch.equal(*found)
    assert torch.equal(*flags)
    assert flags[0].tolist() == [0, 0, 0 if wrong is None else count, 0]


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_whatever_the_row_has_instead_is_noticed(data):
    """Exchanged, shifted and foreign pages of a small pool, where sums could meet."""
    size = data.draw(st.sampled_from([1, 16]))
    pages = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=8, unique=True))
    other = data.draw(
        st.one_of(
            st.permutations(pages),
            st.lists(st.integers(0, 12), min_size=len(pages), max_size=len(pages)),
        )
    )
    table = torch.zeros((3, 8 * 16), dtype=torch.int32)
    rows = LentRows(table)
    right, has = row_of(pages, size), row_of(list(other), size)
    table[1, : len(has)] = has.to(torch.int32)
    rows.learn(1, WHO, State("r", len(right), 7, 0), right)
    rows.compare(torch.tensor([1, 2]), len(right))
    assert rows.take() == ([1] if list(other) != pages else [])


def test_what_is_told_is_not_told_again_until_it_changes():
    rows = LentRows(torch.zeros((3, 64), dtype=torch.int32))

    def found() -> list[int]:
        rows.compare(torch.tensor([1]), 32)
        return rows.take()

    rows.learn(1, WHO, NOW, torch.arange(32))
    assert found() == [1]
    rows.tell(1)
    assert found() == []
    rows.learn(1, WHO, NOW, torch.arange(32))
    assert found() == [1]
    rows.forget(1)
    assert found() == []
    assert rows.known == {}


def test_sums_that_are_wrong_themselves_end_the_comparison_and_accuse_nobody(tmp_path):
    tracer = PrefixCacheTracer(
        Context.alone("prefix-cache", Settings(debug=True, debug_dir=tmp_path), ledger=True)
    )
    request = Request()
    root = SimpleNamespace(parent=None)
    request.last_node = SimpleNamespace(parent=root, value=torch.arange(64, 96))
    request.req_pool_idx, request.cache_protected_len, request.kv = 1, 32, None
    table = torch.zeros((3, 64), dtype=torch.int32)
    table[1, :32] = request.last_node.value.to(torch.int32)
    tracer._rows = rows = LentRows(table)
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(page_size=16, root_node=root))
    for _ in range(LOGGED):
        assert tracer._rows is rows
        rows.learn(1, request, NOW, torch.zeros(32, dtype=torch.int64))
        rows.compare(torch.tensor([1]), 32)
        tracer.judge_rows(scheduler)
    assert tracer._rows is None
    assert [limit.what for limit in tracer.context.status.record().limits] == [ROWS]
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"disaggregation_mode": "decode"},
        {"enable_pdmux": True},
        {"dllm_algorithm": "LowConfidence"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_where_a_row_may_differ_by_right_it_is_not_compared_and_that_is_said(arguments, tmp_path):
    tracer = PrefixCacheTracer(
        Context.alone("prefix-cache", Settings(debug=True, debug_dir=tmp_path), ledger=True)
    )
    tracer.before_scheduler_init(None, SimpleNamespace(**arguments))
    tree = type("UnifiedRadixCache", (SimpleNamespace,), {})(tree_components=("full",))
    tracer.after_scheduler_init(None, SimpleNamespace(tree_cache=tree))
    pool = SimpleNamespace(req_to_token=torch.zeros((3, 64), dtype=torch.int32))
    batch = SimpleNamespace(reqs=[], req_to_token_pool=pool, req_pool_indices=torch.zeros(0))
    tracer.before_run(SimpleNamespace(tree_cache=tree), batch)
    assert tracer._rows is None
    assert [limit.what for limit in tracer.context.status.record().limits] == [ROWS]


def status_with(folder, tree):
    """What the tracer says it can judge in a server with this prefix cache."""
    context = Context.alone("prefix-cache", Settings(debug=True, debug_dir=folder), ledger=True)
    tracer = PrefixCacheTracer(context)
    tracer.before_scheduler_init(None, SimpleNamespace())
    tracer.after_scheduler_init(None, SimpleNamespace(tree_cache=tree))
    return context.status.record()


@pytest.mark.parametrize(
    ("kinds", "limits", "off"),
    [
        (("full",), [], ""),
        (("full", "mamba"), [STATES], ""),
        (("full", "other"), [], "UnifiedRadixCache of full and other (known: SWARadixCache,"),
        (("full", "swa", "mamba"), [], "or full and mamba)"),  # nobody has run it
    ],
)
def test_what_a_node_keeps_beside_pages_is_not_judged_and_said(tmp_path, kinds, limits, off):
    tree = type("UnifiedRadixCache", (SimpleNamespace,), {})(tree_components=kinds)
    status = status_with(tmp_path, tree)
    assert [limit.what for limit in status.limits] == limits
    assert off in status.off
    assert bool(status.off) == bool(off)


def test_a_server_without_a_prefix_cache_has_nothing_to_judge_and_is_sound(tmp_path):
    record = status_with(tmp_path, type("SWAChunkCache", (SimpleNamespace,), {})(disable=True))
    assert record.idle
    assert record.sound
    assert record.state == "nothing to judge: this server keeps no prefix cache"


def lent_one(folder, tree):
    """A tracer, its rows and a request whose first 32 tokens are the prefix cache's."""
    tracer = PrefixCacheTracer(
        Context.alone("prefix-cache", Settings(debug=True, debug_dir=folder), ledger=True)
    )
    tracer._judges = lambda tree: True
    request = Request()
    request.rid, request.req_pool_idx, request.cache_protected_len = "r", 1, 32
    request.last_node, request.kv = 7, None
    tracer._judge_protected(tree, request, "scheduler.run_batch")
    return tracer, LentRows(torch.zeros((3, 64), dtype=torch.int32)), request


@pytest.mark.parametrize("told", [32, 16, None])
def test_where_the_prefix_cache_does_not_tell_its_pages_the_limit_does(told, tmp_path):
    def slots(node, root):
        if told is None:
            raise RuntimeError("no such node")
        return torch.arange(told)

    node = SimpleNamespace(id=7, key=range(32), parent=SimpleNamespace(parent=None), value=[0] * 32)
    core = SimpleNamespace(
        root_node=node.parent, node_by_id=lambda number: node, collect_full_device_indices=slots
    )
    tree = SimpleNamespace(page_size=16, tree_core=core, root_node_handle=lambda space: 0)
    tracer, rows, request = lent_one(tmp_path, tree)
    assert tracer._learn(tree, rows, request) == (told if told == 32 else 0)
    limits = [limit.what for limit in tracer.context.status.record().limits]
    assert limits == ([] if told == 32 else [ROWS])


def test_where_a_node_ends_that_does_not_say_so_the_limit_does(tmp_path):
    native = SimpleNamespace(tree_core=SimpleNamespace())  # a tree in Rust that shows no path
    tracer, _, _ = lent_one(tmp_path, native)
    (limit,) = tracer.context.status.record().limits
    assert "cache_protected_len" in limit.what


def test_a_step_without_a_comparison_keeps_its_place():
    table = torch.zeros((3, 64), dtype=torch.int32)
    rows = LentRows(table)
    rows.learn(1, WHO, NOW, torch.arange(32))
    rows.compare(None, 0)
    rows.compare(torch.tensor([1]), 32)
    assert len(rows._events) == 2
    rows.take()
    rows.take()
    assert not rows._events
