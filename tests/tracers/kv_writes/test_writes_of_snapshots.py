"""A scheduler that is ahead of its forwards: kv-writes judges by what was true at the launch.

On a CPU a forward ends before its launch returns. So here a batch is launched, then pages are freed
and handed out again, and only then the layers write. With real streams, the copy that it compares
with is tested in tests/gpu/test_forward_snapshots_gpu.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from types import SimpleNamespace

import pytest
import torch
from releases import Request
from served_rows import release, row_of
from writing import Writing, put, swa_loc

from g4debug import plugin
from g4debug.trapping.trap import TrapError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]


class Ahead(Writing):
    """Launches batches, and writes later."""

    def __init__(self):
        self.numbers = itertools.count(1)
        entries = plugin.in_force.hooks._entries["attn.forward"]
        self.tracer = next(e.around.__self__ for e in entries if e.owner == "kv-writes")
        super().__init__()

    def new_rig(self):
        rig = super().new_rig()
        runner = rig.runner()
        runner.server_args.disable_overlap_schedule = False
        rig.runner = lambda draft=False: runner
        return rig

    def launch(self, mode="decode"):
        """What ``run_batch`` does, up to the forward's first layer."""
        recorder = plugin.in_force.recorder
        batch = self.made(mode)
        requests = [self.requests[r.rid] for r in self.rig.requests[1:]]
        scheduled = SimpleNamespace(
            reqs=requests, req_pool_indices=batch.req_pool_indices,
            forward_iter=next(self.numbers), seq_lens_cpu=batch.seq_lens,
            forward_mode=batch.forward_mode,
        )  # fmt: skip
        self.tracer.before_run_batch(None, scheduled)
        recorder.begin_step(scheduled)
        self.tracer.before_forward(scheduled, None)
        self.backend.init_forward_metadata(batch)
        pool = self.rig.pool
        if hasattr(pool, "set_swa_loc"):
            pool.set_swa_loc(pool.translate_loc_from_full_to_swa(batch.out_cache_loc))
        return SimpleNamespace(batch=batch, scheduled=scheduled)

    def finish(self, rid):
        """The request has ended: its pages are given back, and its row is another's."""
        request = self.requests[rid]
        row = row_of(request)
        release(self, rid)
        request.finished = lambda: True
        request.put(req_pool_idx=None)
        self.rig.requests = [r for r in self.rig.requests if r.rid != rid]
        other = Request(
            rid="new", session=None, cache_protected_len=0,
            kv_committed_len=0, kv_allocated_len=0, retraction_count=0,
        )  # fmt: skip
        other.put(req_pool_idx=row)
        self.ledger.requests["new"] = self.requests["new"] = other
        self.rig.req_to_token.req_to_token[row] = 0


@pytest.fixture
def it(arm):
    # 0.5.12.post1 has no such barrier, and is limited to ranges under overlap scheduling.
    from sglang.srt.managers import scheduler

    if not hasattr(scheduler.Scheduler, "_apply_war_barrier"):
        pytest.skip("this SGLang has no barrier behind which rows may change")
    arm(G4DEBUG_TRACE="kv-writes")
    return Ahead()


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
def test_what_happens_after_the_launch_does_not_matter(it, mode):
    launched = it.launch(mode)
    it.finish("b")
    it.write(launched.batch)
    assert it.tracer.snapshots.copy is not None
    assert all(x.truth is not None and x.truth.apart == 1 for x in it.tracer.checks.values())


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
def test_a_wrong_location_is_found_in_the_step_of_its_launch(it, mode):
    launched = it.launch(mode)
    wrong = it.right("c", 30)
    put(0, wrong)(launched.batch)
    it.finish("b")
    with pytest.raises(TrapError) as error:
        it.write(launched.batch)
    finding = error.value.finding
    assert finding.kind == "other-request"
    assert finding.location.request == "a"
    assert finding.location.step == plugin.in_force.recorder.step
    assert f"to slot {wrong}, page" in finding.headline


def test_a_request_that_had_ended_is_not_judged(it):
    """SGLang throws away what the forward computed for it, and its pages may be anybody's."""
    launched = it.launch()
    it.finish("a")
    put(0, it.right("c", 30))(launched.batch)
    it.write(launched.batch)


def test_but_nothing_is_ever_written_outside_of_the_pool(it):
    launched = it.launch()
    it.finish("a")
    put(0, 10**6)(launched.batch)
    with pytest.raises(TrapError) as error:
        it.write(launched.batch)
    assert error.value.finding.kind == "out-of-range"


def test_a_forward_that_the_scheduler_did_not_launch_is_checked_for_ranges(it):
    it.launch()
    plugin.in_force.recorder.count()
    batch = it.made("decode")
    it.backend.init_forward_metadata(batch)
    put(0, it.right("c", 30))(batch)
    it.write(batch, it.full_layers())
    assert all(x.truth is None for x in it.tracer.checks.values())


WHOLE = "ForwardBatch.out_cache_loc does not agree with"
SLIDING = "the sliding layers' locations do not agree with"
NOT_KNOWN = "whether ForwardBatch.out_cache_loc was wrong already"


@pytest.mark.parametrize("spoilt", ["out_cache_loc", "the sliding layers'"])
@pytest.mark.parametrize("captured", [False, True])
def test_which_of_the_two_locations_is_wrong(it, spoilt, captured, monkeypatch):
    """Those of sliding layers are made of ``out_cache_loc``, and may be wrong with it or alone.

    When the finding is described, the batch has the next forward's. Of a forward in a CUDA graph
    the locations are not kept, so there it is not known.
    """
    launched = it.launch()
    wrong, mapping = it.right("c", 30), it.rig.allocator.full_to_swa_index_mapping
    if spoilt == "out_cache_loc":
        put(0, wrong)(launched.batch)
    if spoilt != "out_cache_loc" or swa_loc(it) is not None:
        swa_loc(it)[0] = mapping[wrong]
    confirmed = it.tracer._confirmed

    def later(checked, seen):
        launched.batch.out_cache_loc = launched.batch.out_cache_loc + 1  # the next token's
        if captured:
            checked = dataclasses.replace(checked, full=None)
        monkeypatch.setattr(it.tracer, "describe", lambda _, *of: describe(checked, *of))
        return confirmed(checked, seen)

    describe = it.tracer.describe
    monkeypatch.setattr(it.tracer, "_confirmed", later)
    with pytest.raises(TrapError) as error:
        it.write(launched.batch, it.sliding_layers())
    cause = error.value.finding.cause
    if captured:
        assert SLIDING in cause
        assert NOT_KNOWN in cause
    elif spoilt == "out_cache_loc":
        assert WHOLE in cause
        assert f"it has slot {wrong} of the full pool" in cause
        assert "the sliding layers' location was made from it" in cause
    else:
        assert SLIDING in cause
        assert NOT_KNOWN not in cause
