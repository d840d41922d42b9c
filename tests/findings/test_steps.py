"""The flight recorder, on the fields that SGLang's scheduler batch has."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from real_backend import PAGE, Rig

from g4debug.findings.record import Pool
from g4debug.findings.steps import Recorder, ranks


def batch_of(*requests, mode="DECODE", spec=None, lengths=None):
    if lengths is None:
        lengths = torch.tensor([10 * n for n, _ in enumerate(requests, 1)])
    return SimpleNamespace(
        reqs=list(requests),
        seq_lens_cpu=lengths,
        forward_mode=SimpleNamespace(name=mode) if mode else None,
        spec_info=spec,
    )


def request(rid, index):
    return SimpleNamespace(rid=rid, req_pool_idx=index)


def test_steps_count_from_one_and_only_the_last_are_kept():
    recorder = Recorder(3)
    assert (recorder.step, recorder.current) == (0, None)
    for n in range(5):
        recorder.begin_step(batch_of(request(f"r{n}", n), request("x", 9)))
    assert recorder.step == 5
    assert [s.step for s in recorder.steps] == [3, 4, 5]
    last = recorder.current
    assert last.rids == ("r4", "x")
    assert last.seq_lens == (10, 20)
    assert (last.forward_mode, last.spec_info, last.full_used) == ("DECODE", "", -1)


def test_a_step_names_the_type_of_its_speculative_state():
    class FrozenKVMTPDraftInput:
        pass

    recorder = Recorder(1)
    recorder.begin_step(batch_of(request("a", 1), spec=FrozenKVMTPDraftInput()))
    assert recorder.current.spec_info == "FrozenKVMTPDraftInput"


def test_a_batch_without_host_lengths_or_mode_is_recorded_all_the_same():
    recorder = Recorder(1)
    batch = batch_of(request("a", 1), mode=None)
    batch.seq_lens_cpu = None
    recorder.begin_step(batch)
    assert (recorder.current.rids, recorder.current.seq_lens) == (("a",), ())


def test_no_tensor_is_kept():
    """A device tensor in here could not be read after a sticky CUDA error."""
    recorder = Recorder(1)
    recorder.begin_step(batch_of(request("a", 1)))
    for value in vars(recorder.current).values():
        assert not isinstance(value, torch.Tensor)
        assert all(type(v) in (str, int) for v in (value if type(value) is tuple else [value]))


def test_a_request_that_ends_in_the_step_is_still_known_by_its_row():
    recorder = Recorder(1)
    a, b, waiting = request("a", 7), request("b", 2), request("w", None)
    recorder.begin_step(batch_of(a, b, waiting))
    a.req_pool_idx = None  # SGLang freed its row before the step's finding was read
    assert recorder.requests_by_pool_index() == {7: "a", 2: "b"}
    recorder.begin_step(batch_of(request("c", 7)))
    assert recorder.requests_by_pool_index() == {7: "c"}


def test_a_step_keeps_what_its_requests_had_when_it_began():
    """A step is made only when somebody reads it, but from values that were kept when it began."""
    recorder = Recorder(2)
    a, waiting = request("a", 7), request("w", None)
    for r, row in ((a, 10), (waiting, 0)):
        r.kv_committed_len, r.kv_allocated_len, r.swa_evicted_seqlen = row, row + 6, row // 2
    batch = batch_of(a, waiting, lengths=torch.tensor([10, 4]))
    recorder.begin_step(batch)
    batch.seq_lens_cpu += 3
    a.kv_committed_len = a.kv_allocated_len = a.swa_evicted_seqlen = 99
    batch.reqs.pop()
    step = recorder.current
    assert (step.rids, step.rows, step.seq_lens) == (("a", "w"), (7, -1), (10, 4))
    assert (step.committed, step.allocated, step.evicted) == ((10, 0), (16, 6), (5, 0))
    assert recorder.steps == (step,)


def test_a_length_that_a_request_has_not_got_is_not_made_up():
    recorder = Recorder(1)
    a, b = request("a", 1), request("b", 2)
    a.kv_committed_len = a.kv_allocated_len = a.swa_evicted_seqlen = 8
    recorder.begin_step(batch_of(a, b))
    step = recorder.current
    assert (step.committed, step.allocated, step.evicted) == ((), (8, 0), ())


def test_pools_are_the_allocators(sglang):
    rig = Rig()
    recorder = Recorder(1)
    assert recorder.pools() == ()
    recorder.attach(SimpleNamespace(tp_rank=2, token_to_kv_pool_allocator=rig.allocator))
    assert recorder.rank == 2
    before = {p.name: p for p in recorder.pools()}
    assert before["full"] == Pool("full", 640 // PAGE + 1, PAGE, 640, 384)
    assert before["swa"] == Pool("swa", 320 // PAGE + 1, PAGE, 320, 0)
    rig.admit("a", 50)  # 4 pages of 16
    recorder.begin_step(batch_of(request("a", 1)))
    assert (recorder.current.full_used, recorder.current.swa_used) == (384 + 64, 64)


def test_a_pool_without_a_window_is_one_pool(sglang):
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    allocator = PagedTokenToKVPoolAllocator(160, PAGE, torch.float32, "cpu", None, False)
    recorder = Recorder(1)
    recorder.attach(SimpleNamespace(token_to_kv_pool_allocator=allocator))
    assert recorder.pools() == (Pool("full", 11, PAGE, 160, 0),)


@pytest.mark.parametrize("broken", [SimpleNamespace(), None])
def test_a_scheduler_without_pools_gives_none(broken):
    recorder = Recorder(1)
    recorder.attach(broken)
    assert recorder.pools() == ()
    assert recorder.rank == -1


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (None, (-1, -1, -1)),
        (SimpleNamespace(), (-1, -1, -1)),  # still starting
        (SimpleNamespace(dp_rank=None, tp_rank=1, pp_rank=0), (-1, 1, 0)),
        (
            SimpleNamespace(
                dp_rank=None, tp_rank=1, pp_rank=0, server_args=SimpleNamespace(dp_size=1)
            ),
            (0, 1, 0),
        ),
        (SimpleNamespace(dp_rank=None, attn_dp_rank=3, tp_rank=6, pp_rank=0), (3, 6, 0)),
        (SimpleNamespace(dp_rank=2, attn_dp_rank=0, tp_rank=0, pp_rank=1), (2, 0, 1)),
        # From 0.5.14 on.
        (SimpleNamespace(ps=SimpleNamespace(dp_rank=None, tp_rank=1, pp_rank=2)), (-1, 1, 2)),
    ],
)
def test_the_ranks_of_a_scheduler(scheduler, expected):
    """What it does not know is not known, and never 0 by accident."""
    assert ranks(scheduler) == expected


def test_the_ranks_of_a_scheduler_whose_module_asks_for_them(monkeypatch):
    """0.5.23 keeps them in a context that its scheduler's module imports."""

    class Scheduler:
        pass

    here = sys.modules[__name__]
    context = SimpleNamespace(dp_rank=None, attn_dp_rank=1, tp_rank=3, pp_rank=0)
    monkeypatch.setattr(here, "get_parallel", lambda: context, raising=False)
    assert ranks(Scheduler()) == (1, 3, 0)

    def not_yet():
        raise RuntimeError("no context")

    monkeypatch.setattr(here, "get_parallel", not_yet)
    assert ranks(Scheduler()) == (-1, -1, -1)


def test_what_is_done_for_a_step_before_it_begins_belongs_to_it():
    recorder = Recorder(4)
    assert recorder.event_step == 0
    recorder.prepare_step()
    recorder.prepare_step()  # a mixed batch is prepared in two parts
    assert (recorder.step, recorder.event_step) == (0, 1)
    recorder.begin_step(batch_of(request("a", 1)))
    assert (recorder.step, recorder.event_step) == (1, 1)


def test_a_step_that_cannot_be_recorded_is_counted_and_nobody_takes_the_last_one_for_it():
    recorder = Recorder(4)
    recorder.begin_step(batch_of(request("a", 1)))
    with pytest.raises(AttributeError):
        recorder.begin_step(SimpleNamespace())
    assert recorder.step == 2
    assert recorder.current is None
    assert recorder.requests_by_pool_index() == {}
    assert [s.step for s in recorder.steps] == [1]


def test_pools_that_were_read_for_a_step_are_recorded_once(sglang):
    """Whoever needs them before the step is counted reads them for its record, too."""
    recorder = Recorder(3)
    left = [100, 90, 80]
    allocator = SimpleNamespace(size=128, available_size=lambda: left.pop(0), page_size=1)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    recorder.attach(scheduler)
    assert recorder.read_pools(scheduler) == (("full", 128, 100),)
    recorder.begin_step(batch_of(request("a", 1)))
    recorder.begin_step(batch_of(request("a", 1)))  # nobody has read them for this one
    assert [step.full_used for step in recorder.steps] == [28, 38]
    assert left == [80]
