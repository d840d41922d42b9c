"""A scheduler that is ahead of its forwards, on SGLang's real pools, allocator and backend.

On a CPU a forward ends before its launch returns. So here the scheduler is made to run ahead: the
forward's tables are built when it is launched, then pages are freed and handed out again, and only
then the layers ask for their tables. With real streams: tests/gpu/test_forward_snapshots_gpu.py.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from real_backend import PAGE
from releases import Request
from served_rows import ARMED, Serving, release, row_of

from g4debug import plugin, speculation
from g4debug.dumps import reading
from g4debug.hooking import targets
from g4debug.hooking.table_barrier import wait_for_tables
from g4debug.sanitizer.forward_snapshots import IN_FLIGHT, ForwardSnapshots
from g4debug.tracers.page_table.tracer import PageTableTracer
from g4debug.trapping.trap import TrapError

BARRIER = "sglang.srt.managers.scheduler.Scheduler._apply_war_barrier"


class Ahead(Serving):
    """Launches batches, and runs the attention of a launch later."""

    def __init__(self, tracer, overlap=True):
        self.tracer, self.overlap = tracer, overlap
        self.numbers = itertools.count(1)
        super().__init__()

    def new_rig(self):
        rig = super().new_rig()
        runner = rig.runner()
        runner.server_args.disable_overlap_schedule = not self.overlap
        rig.runner = lambda draft=False: runner
        return rig

    def launch(self, mode="decode", build=True):
        """What ``run_batch`` does, up to the forward's first layer. Returns a way to go on."""
        recorder, number = plugin.in_force.recorder, next(self.numbers)
        batch = self.rig.batch(mode, self.rig.requests[1:], self.backend)
        requests = [self.requests[r.rid] for r in self.rig.requests[1:]]
        scheduled = SimpleNamespace(
            reqs=requests, req_pool_indices=batch.req_pool_indices, forward_iter=number,
            seq_lens_cpu=batch.seq_lens, forward_mode=batch.forward_mode,
        )  # fmt: skip
        self.tracer.before_run_batch(None, scheduled)
        recorder.begin_step(scheduled)
        self.tracer.before_forward(scheduled, None)
        if build:
            self.backend.init_forward_metadata(batch)
        return SimpleNamespace(batch=batch, scheduled=scheduled)

    def run(self, launched, build=False):
        if build:  # the tables are built late, from whatever is there by then
            self.backend.init_forward_metadata(launched.batch)
        self.rig.forward(self.backend, launched.batch)

    def finish(self, rid):
        """The request has ended: its pages and its row are given back, as SGLang does it."""
        request, row = self.requests[rid], row_of(self.requests[rid])
        release(self, rid)
        pool = self.rig.req_to_token
        pool.free_slots = [row, *pool.free_slots]
        if self.rig.next_row() != row:  # this release begins at the other end
            pool.free_slots = [*pool.free_slots[1:], row]
        request.finished = lambda: True
        request.put(req_pool_idx=None)
        self.rig.requests = [r for r in self.rig.requests if r.rid != rid]
        return row

    def raised(self, launched, **how):
        with pytest.raises(TrapError) as error:
            self.run(launched, **how)
        return error.value.finding, reading.read(error.value.path)


@pytest.fixture
def ahead(arm, monkeypatch):
    """``ahead()``: a server with overlap scheduling, and a tracer in raise mode."""
    tracers = []
    install = PageTableTracer.install
    monkeypatch.setattr(
        PageTableTracer, "install", lambda self: (tracers.append(self), install(self))[1]
    )
    monkeypatch.setitem(targets.SITES, "scheduler.war_barrier", (("", BARRIER),))

    def make(overlap=True, mode="raise"):
        arm(**ARMED, G4DEBUG_MODE=mode)
        return Ahead(tracers[-1], overlap)

    return make


def test_what_happens_after_the_launch_does_not_matter(ahead):
    it = ahead()
    launched = it.launch()
    row = it.finish("a")
    it.admit("d", 50, 0)
    assert row_of(it.requests["d"]) == row  # the row and the pages are another request's
    it.run(launched)
    it.run(it.launch())  # and the next forward sees what is true for it
    part = plugin.in_force.recorder.status.parts["page-table"]
    assert not part.record().limits
    assert {c.what for c in part.record().checked} >= {"tables"}


def test_the_live_tables_would_have_accused_it(ahead):
    """What the copy is for: without it, the same healthy forward is a finding."""
    it = ahead(overlap=False)
    launched = it.launch()
    it.finish("a")
    it.admit("d", 30, 0)
    it.raised(launched)


@pytest.mark.parametrize("mode", ["decode", "target_verify"])
def test_a_wrong_cell_is_found_although_everything_has_moved_on(ahead, mode):
    it = ahead()
    launched = it.launch(mode)
    right, row = it.rig.page("b", 2), row_of(it.requests["b"])
    it.backend.forward_metadata.page_table[1, 2] = right + 1
    it.finish("a")
    it.admit("d", 50, 0)
    # On a GPU the host looks when the next step has begun, and the tables are the next forward's.
    poll, it.tracer.poll = it.tracer.poll, lambda: None
    it.run(launched)
    it.backend.forward_metadata.page_table.fill_(0)
    plugin.in_force.recorder.step += 1
    with pytest.raises(TrapError) as error:
        poll()
    finding, record = error.value.finding, reading.read(error.value.path)
    assert finding.location.step == 1
    assert (finding.location.request, finding.location.row, finding.location.column) == ("b", 1, 2)
    assert f"the right FULL page is {right}" in finding.headline
    assert f"row {row} of req_to_token (full page {right})" in finding.cause
    table = record.table
    assert (table.row0, table.column0, table.rids) == (1, 0, ("b",))
    assert table.bad.tolist() == [[1, 2, right + 1]]
    assert int(table.values[0, 2]) == right + 1
    assert len(table.values[0]) == -(-int(table.seq_lens[0]) // PAGE)


def test_a_row_that_was_wrong_at_launch_is_found_after_it_was_put_right(ahead):
    it = ahead()
    mine, theirs = it.rig.page("b", 5), it.rig.page("a", 1)
    it.write("b", 5, theirs)
    launched = it.launch()
    finding, _ = it.raised(launched)
    assert finding.kind == "foreign-page"
    assert finding.expected.endswith(f": full-pool page {mine}")


def test_a_page_that_was_free_at_launch(ahead):
    it = ahead(mode="log")
    page = it.rig.page("c", 1)
    release(it, "c", torch.arange(page * PAGE, (page + 1) * PAGE))
    seen = []
    it.tracer.context.trap.report = lambda finding, evidence: seen.append(finding)
    it.run(it.launch())
    assert "use-after-free" in {f.kind for f in seen}


def test_a_request_that_had_ended_is_nobodys_business(ahead, caplog):
    """Its table is built from a row that is another's by now, and what comes out is thrown away."""
    it = ahead()
    it.run(it.launch())
    second = it.launch(build=False)
    it.finish("a")  # while the result of the first forward is processed
    it.admit("d", 30, 0)
    it.run(second, build=True)
    assert not it.ledger.broken


def test_but_a_page_that_no_pool_has_is_told_all_the_same(ahead):
    it = ahead()
    launched = it.launch()
    it.backend.forward_metadata.page_table[0, 1] = 10**6
    it.finish("a")
    finding, _ = it.raised(launched)
    assert finding.kind == "out-of-range"
    assert finding.location.request == "a"


def test_a_request_that_ends_in_this_very_forward_is_judged(ahead):
    """It ends when this forward's own result is processed: until then its tokens count."""
    it = ahead()
    launched = it.launch()
    right = it.rig.page("a", 1)
    it.backend.forward_metadata.page_table[0, 1] = right + 1
    it.tracer.before_process_result(None, launched.scheduled)
    it.finish("a")
    finding, _ = it.raised(launched)
    assert finding.location.request == "a"


def test_a_forward_that_was_not_launched_by_the_scheduler_has_no_copy(ahead):
    """The copy is of an earlier step. Nothing may be compared with it."""
    it = ahead()
    it.run(it.launch())
    it.finish("a")
    it.admit("d", 30, 0)
    plugin.in_force.recorder.step += 1
    batch = it.rig.batch("decode", it.rig.requests[1:], it.backend)
    it.backend.init_forward_metadata(batch)
    it.rig.forward(it.backend, batch)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_dummy_requests_are_not_judged(ahead, overlap, served):
    """As SGLang runs them while it captures its prefills: the rows of nobody, of zeros.

    It does so before the first batch, and where it captures anew between two batches.
    """
    it = ahead(overlap)
    it.tracer.after_run_batch(None, None)
    if served:
        it.run(launched := it.launch())
        it.tracer.after_run_batch(None, None, launched.scheduled)
    rows = [it.finish("a")]
    it.admit("d", 3 * PAGE, 0)  # in the row that another had at the last launch
    rows.append(it.rig.next_row())
    assert not it.rig.req_to_token.req_to_token[rows[1]].any()
    dummies = [SimpleNamespace(req_pool_idx=row, tokens=3 * PAGE) for row in rows]
    it.rig.step(it.backend, "extend", dummies)
    it.tracer.poll()
    assert not it.ledger.broken


def test_without_the_barrier_only_ranges_are_checked(ahead, monkeypatch):
    monkeypatch.setitem(targets.SITES, "scheduler.war_barrier", (("", None),))
    it = ahead()
    assert it.tracer.snapshots.copy is None
    assert any("overlap scheduling" in why for why in it.tracer.backends.limits)
    launched = it.launch()
    it.backend.forward_metadata.page_table[1, 2] += 1
    it.run(launched)


# --- who was in which launch ---------------------------------------------------------------


def served(row, number):
    request = Request(rid=f"r{number}", req_pool_idx=row)
    return SimpleNamespace(
        reqs=[request], req_pool_indices=torch.tensor([row]), forward_iter=number
    )


def test_forwards_are_remembered_as_long_as_they_may_be_in_flight():
    snapshots = ForwardSnapshots()
    snapshots.copy = SimpleNamespace(make=lambda rows, step: None)
    batches = {n: served(3, n) for n in range(1, 3 * IN_FLIGHT)}
    for number, batch in batches.items():
        snapshots.begin()
        snapshots.take(batch, 100 + number)
        snapshots.take(served(4, 999), 0)  # the draft's forward of the same batch makes no copy
        snapshots.returned(None)
    last = max(batches)
    assert snapshots.request(100 + last, 3).rid == f"r{last}"
    assert snapshots.request(100 + last, 4) is None
    assert snapshots.is_void(101, 3)  # too long ago to be known
    assert not snapshots.is_void(100 + last, 3)
    snapshots.processing(batches[last])
    batches[last].reqs[0].finished = lambda: True
    assert not snapshots.is_void(100 + last, 3)  # it ended in that forward
    assert snapshots.is_void(99 + last, 3) is False
    batches[last - 1].reqs[0].put(req_pool_idx=None)  # retracted meanwhile
    assert snapshots.is_void(99 + last, 3)
    snapshots.processing(SimpleNamespace(forward_iter=None))  # SGLang has batches without a number


def test_an_empty_batch_makes_no_copy():
    snapshots = ForwardSnapshots()
    snapshots.copy = SimpleNamespace(make=lambda rows, step: pytest.fail("nothing to copy"))
    snapshots.begin()
    snapshots.take(SimpleNamespace(req_pool_indices=torch.tensor([]), reqs=[]), 1)
    snapshots.take(SimpleNamespace(req_pool_indices=None, reqs=None), 1)


def test_without_a_barrier_the_scheduling_stream_waits_for_the_forward():
    waited = []
    stream = SimpleNamespace(wait_stream=waited.append)
    wait_for_tables(SimpleNamespace(schedule_stream=stream, forward_stream="forward"))
    assert waited == ["forward"]


def test_sglangs_barrier_is_called_early_and_keeps_its_event():
    runner = SimpleNamespace(war_fastpath_read_done_event="event")
    called = []

    def barrier():
        called.append(runner.war_fastpath_read_done_event)
        runner.war_fastpath_read_done_event = None

    prefill = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: False))
    decode = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
    scheduler = SimpleNamespace(
        model_worker=SimpleNamespace(war_fastpath_runner=runner), _apply_war_barrier=barrier,
        last_batch=decode,
    )  # fmt: skip
    wait_for_tables(scheduler)  # a decode's result changes no row of a running request
    scheduler.last_batch = None
    wait_for_tables(scheduler)
    assert called == []
    scheduler.last_batch = prefill
    wait_for_tables(scheduler)
    assert called == ["event"]
    assert runner.war_fastpath_read_done_event == "event"
    # A release that has its barrier right behind the launch needs no help.
    wait_for_tables(SimpleNamespace(model_worker=SimpleNamespace(), _apply_war_barrier=barrier))
    assert called == ["event"]


@pytest.mark.parametrize("algorithm", ["FROZEN_KV_MTP", "EAGLE", "EAGLE3", "STANDALONE", "another"])
def test_the_tables_of_a_draft(ahead, monkeypatch, algorithm):
    """A draft is judged like the target, where it is known who has the pages in its tables."""
    it = ahead()
    state, judged = tables_of_a_draft(it, monkeypatch, algorithm)
    known = {adapter.name for adapter in speculation.adapters()}
    runs = not targets.restores_pages() and algorithm in known
    whole = algorithm == "FROZEN_KV_MTP" or runs
    assert judged == {"full": (True, whole), "swa": (whole, whole)}
    assert (state.partial is None) is whole
    if not whole:
        what, why = state.partial
        assert what == (
            "no page of the draft is told to be free or another request's, "
            "and in its sliding layers only ranges"
        )
        assert ("never run" in why) is not targets.restores_pages()


@pytest.mark.once("it sets for itself which release this is")
def test_a_draft_may_write_into_pages_that_a_release_restores(ahead, monkeypatch):
    monkeypatch.setattr(targets, "restores_pages", lambda: True)
    state, judged = tables_of_a_draft(ahead(), monkeypatch, "EAGLE")
    assert judged == {"full": (True, False), "swa": (False, False)}
    assert "restore_state" in state.partial.why


def tables_of_a_draft(it, monkeypatch, algorithm):
    """Its BackendState, and by pool: (there is a truth, the truth has the shadow)."""
    runner = it.rig.runner
    draft = runner(True)
    draft.is_draft_worker = True
    draft.server_args.speculative_algorithm = algorithm
    draft.server_args.disable_overlap_schedule = False
    monkeypatch.setattr(draft.spec_algorithm, "name", algorithm, raising=False)
    it.rig.runner = lambda draft_worker=False: draft
    backend = it.rig.backend(True)
    state, batch = it.tracer.backends, it.rig.batch("decode", it.rig.requests[1:], backend)
    judged = {}
    for pool in ("full", "swa"):
        truth = state.truth(backend, batch, batch.req_pool_indices, 3, pool, 0)
        judged[pool] = (truth is not None, truth is not None and truth.shadow is not None)
    return state, judged
