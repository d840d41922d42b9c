"""kv-integrity where the scheduler is ahead of its forwards, on SGLang's real pools and allocator.

A CPU has no streams. So here the forward stream is a list: forwards and the tracer's own work are
queued on it, and done later and in order, while the scheduler has gone on. With real
streams: tests/gpu/test_kv_overlap_gpu.py.
"""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import releases
import torch
from real_backend import DIM, PAGE, Rig

from g4debug import plugin
from g4debug.dumps import reading
from g4debug.hooking import targets
from g4debug.tracers.kv_integrity.tracer import KvIntegrityTracer
from g4debug.trapping.trap import TrapError

BARRIER = "sglang.srt.managers.scheduler.Scheduler._apply_war_barrier"
TOKENS = 3 * PAGE + 5


class Request(SimpleNamespace):
    """What the tracer and the ledger read of SGLang's Req."""


class Stream:
    """A stream of the device: queued work is done when the device gets there."""

    def __init__(self):
        self.queued = []

    def __call__(self, work, reads):
        sent = Sent(self)
        self.queued.append(lambda: sent.put(work()))
        return sent

    def drain(self, count=None):
        for _ in range(len(self.queued) if count is None else count):
            self.queued.pop(0)()


class Sent:
    def __init__(self, stream):
        self.stream, self.words = stream, None

    def put(self, words):
        self.words = torch.empty(0) if words is None else words

    def arrived(self):
        return self.words is not None

    def fetch(self):
        while self.words is None:  # the host waits for the device
            self.stream.drain(1)
        return self.words.numpy()


class Ahead:
    """A scheduler and its forwards. ``ordered``: the tracer's work goes to the forward stream."""

    def __init__(self, tracer, folder, ordered=True):
        self.tracer, self.ledger, self.folder = tracer, tracer.ledger, folder
        self.stream, self.numbers, self.requests = Stream(), itertools.count(1), {}
        self.recorder = plugin.in_force.recorder
        self.rig = Rig()
        scheduler = SimpleNamespace(
            server_args=SimpleNamespace(disable_overlap_schedule=False),
            enable_overlap=True,
            forward_stream=None,
        )
        tracer.after_scheduler_init(None, scheduler)
        if ordered:
            tracer.lane.send = self.stream

    # --- what the scheduler does

    def allocate(self, rid, tokens):
        """A request gets room for so many more tokens, as for the next batch."""
        self.recorder.prepare_step()
        request = self.requests.get(rid)
        fields = {"kv_committed_len": 0, "kv_allocated_len": 0, "req_pool_idx": None}
        if request is None:
            request = Request(rid=rid, session=None, **fields)
            self.requests[rid] = self.ledger.requests[rid] = request
            (request.req_pool_idx,) = self.rig.req_to_token.alloc(
                [SimpleNamespace(rid=rid, req_pool_idx=None, **releases.no_kv())]
            )
        before = request.kv_allocated_len
        request.kv_allocated_len = after = before + tokens
        row = self.row(rid)
        self.ledger.batch = self.ledger.allocating = SimpleNamespace(
            reqs=[request], seq_lens_cpu=torch.tensor([after]),
            req_to_token_pool=self.rig.req_to_token,
        )  # fmt: skip
        last = torch.tensor([int(row[before - 1]) if before else -1])
        ends = torch.tensor([before]), torch.tensor([before])
        found = self.rig.allocator.alloc_extend(
            *ends, torch.tensor([after]), torch.tensor([after]), last, tokens
        )
        row[before:after] = found.to(torch.int32)
        return found.clone()

    def row(self, rid):
        return self.rig.req_to_token.req_to_token[self.requests[rid].req_pool_idx]

    def page(self, rid, column, pool="full"):
        token = self.row(rid)[column * PAGE : column * PAGE + 1].long()
        if pool == "swa":
            token = self.rig.pool.translate_loc_from_full_to_swa(token)
        return int(token) // PAGE

    def launch(self, *rids, tokens, commits=True, verify=False):
        """A forward that writes KV of these tokens is put on its stream.

        commits: the host knows from the beginning how many count. verify: of a speculation.
        """
        written = torch.cat(tokens) if isinstance(tokens, (list, tuple)) else tokens
        swa = self.rig.pool.translate_loc_from_full_to_swa(written).clone()
        self.stream.queued.append(lambda: self.write(written, swa))
        batch = SimpleNamespace(
            reqs=[self.requests[r] for r in rids], forward_iter=next(self.numbers),
            forward_mode=SimpleNamespace(is_decode=lambda: verify), seq_lens_cpu=None,
            spec_algorithm=SimpleNamespace(is_none=lambda: not verify),
        )  # fmt: skip
        self.recorder.count()
        for request in batch.reqs if commits else ():
            if request.req_pool_idx is not None:
                request.kv_committed_len = request.kv_allocated_len
        self.tracer.after_run_batch(None, None, batch)
        return batch

    def process(self, batch, **committed):
        """The host has waited for the forward of this batch. committed: what it learns, by rid."""
        self.ledger.settle(wait=True)
        self.tracer.before_result(None, batch)
        for rid, tokens in committed.items():
            self.requests[rid].kv_committed_len = tokens
        self.tracer.after_result(None, None, batch)

    def finish(self, rid):
        """The request has ended: its pages and its row are given back."""
        request = self.requests.pop(rid)
        tokens = self.rig.req_to_token.req_to_token[request.req_pool_idx]
        self.rig.allocator.free(tokens[: request.kv_allocated_len].long())
        self.rig.req_to_token.free_slots.append(request.req_pool_idx)
        request.req_pool_idx = None
        del request.kv_committed_len  # as in 0.5.23, where they are gone with Req.kv
        return request

    def idle(self):
        self.stream.drain()
        for _ in self.tracer.check_all():
            pass

    # --- what the device does

    def write(self, tokens, swa):
        pool, known = self.rig.pool, {}
        for layer in self.rig.layers:
            k, v = (torch.randn(len(tokens), 1, DIM) for _ in "kv")
            parameters = inspect.signature(type(pool).set_kv_buffer).parameters
            if "loc_info" in parameters:
                from sglang.srt.mem_cache.memory_pool import KVWriteLoc

                pool.set_kv_buffer(layer, KVWriteLoc(tokens, swa), k, v)
                continue
            if "swa_loc" in parameters:
                known["swa_loc"] = swa
            pool.set_kv_buffer(layer, tokens, k, v, **known)

    def buffer(self, pool):
        return getattr(self.rig.pool, f"{pool}_kv_pool").k_buffer[1]

    def found(self):
        return [reading.read(p).finding for p in sorted(self.folder.glob("*.pt"))]


@pytest.fixture
def ahead(arm, monkeypatch):
    """``ahead()``: a server with overlap scheduling."""
    made = []
    install = KvIntegrityTracer.install
    monkeypatch.setattr(
        KvIntegrityTracer, "install", lambda self: (made.append(self), install(self))
    )
    monkeypatch.setitem(targets.SITES, "scheduler.war_barrier", (("", BARRIER),))

    def make(ordered=True, mode="raise"):
        folder = arm(G4DEBUG_TRACE="kv-integrity", G4DEBUG_MODE=mode)
        return Ahead(made[-1], folder, ordered)

    return make


def a_request_that_ends_while_it_is_launched_again(it):
    """The next forward still has it, and writes a token for it; its pages are the next one's."""
    it.allocate("a", TOKENS)
    first = it.launch("a", tokens=it.row("a")[:TOKENS].long())
    second = it.launch("a", tokens=it.allocate("a", 1))
    it.process(first)
    it.finish("a")  # the second forward has not begun
    third = it.launch("b", tokens=it.allocate("b", TOKENS))
    it.process(second)
    fourth = it.launch("b", tokens=it.allocate("b", PAGE))
    it.process(third)
    it.process(fourth)
    it.idle()


def test_a_request_that_ended_may_write_until_its_last_launch(ahead):
    it = ahead()
    a_request_that_ends_while_it_is_launched_again(it)
    assert not it.ledger.broken
    assert not it.tracer.context.disabled
    part = plugin.in_force.recorder.status.parts["kv-integrity"].record()
    assert not part.limits
    assert {c.what: c.count for c in part.checked}["stamps of pages"] > 0
    # And it did look: the pages of b are sealed, those of a were stamped and handed out.
    assert it.tracer.pools["full"].sealed.sum() == 4


def test_on_the_stream_of_the_scheduler_it_would_have_accused_it(ahead):
    """What the order is for: without it, the same healthy server is a finding."""
    it = ahead(ordered=False, mode="log")
    a_request_that_ends_while_it_is_launched_again(it)
    assert it.found()


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_a_write_into_a_freed_page_after_the_last_launch(ahead, pool):
    it = ahead()
    it.allocate("a", TOKENS)
    first = it.launch("a", tokens=it.row("a")[:TOKENS].long())
    page = it.page("a", 1, pool)
    it.process(first)
    it.finish("a")
    step = it.recorder.step
    it.stream.queued.append(lambda: it.buffer(pool)[page * PAGE + 7].fill_(3.0))
    second = it.launch("b", tokens=it.allocate("b", TOKENS))
    third = it.launch("b", tokens=it.allocate("b", 1))  # the host is ahead
    with pytest.raises(TrapError) as error:
        it.process(second)
    finding = error.value.finding
    assert finding.kind == "write-after-free"
    assert f"{pool.upper()} page {page} was written after it was freed (KV slot 7" in (
        finding.headline
    )
    assert "handed out again to request b" in finding.headline
    assert finding.location.step == step + 1  # not the step that runs by now
    assert third.forward_iter == second.forward_iter + 1


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_a_committed_page_that_changes_is_found_before_its_tokens_leave(ahead, pool):
    it = ahead()
    it.allocate("a", TOKENS)
    it.launch("a", tokens=it.row("a")[:TOKENS].long())
    page = it.page("a", 1, pool)
    it.stream.queued.append(lambda: it.buffer(pool)[page * PAGE + 4].add_(1.0))
    second = it.launch("a", tokens=it.allocate("a", 1))
    step = it.recorder.step
    it.launch("a", tokens=it.allocate("a", 1))
    with pytest.raises(TrapError) as error:
        it.process(second)
    finding = error.value.finding
    assert finding.kind == "kv-changed"
    assert finding.location.step == step
    assert f"it still had it in step {step - 1}" in finding.expected
    assert finding.got.startswith(f"another checksum in step {step}")


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_a_change_before_a_free_is_found_although_the_page_is_handed_out_by_then(ahead, pool):
    """SGLang hands out first what was freed last, and long before the result has arrived."""
    it = ahead()
    it.allocate("a", TOKENS)
    first = it.launch("a", tokens=it.row("a")[:TOKENS].long())
    page = it.page("a", 1, pool)
    it.process(first)
    it.stream.drain()
    it.stream.queued.append(lambda: it.buffer(pool)[page * PAGE + 4].add_(1.0))
    it.finish("a")
    tokens = it.allocate("b", TOKENS)
    assert page in {it.page("b", column, pool) for column in range(3)}
    second = it.launch("b", tokens=tokens)
    with pytest.raises(TrapError) as error:
        it.process(second)
    finding = error.value.finding
    assert finding.kind == "kv-changed"
    assert f"{pool.upper()} page {page}" in finding.headline
    assert "request a" in finding.headline
    assert "handed out to a" in finding.owner


def test_what_was_handed_out_before_it_was_compared_is_no_finding(ahead, monkeypatch):
    """On a GPU a hand-out is known later. Its page may be compared in between, with its new KV."""
    it = ahead(mode="log")
    it.allocate("a", TOKENS)
    it.process(it.launch("a", tokens=it.row("a")[:TOKENS].long()))
    watched = it.tracer.pools["full"]
    pages = np.array([it.page("a", column) for column in range(3)])
    watched.hand_outs += 1  # of page 0, under way to the host
    enter = it.tracer._comparing(watched, pages)
    watched.hand_outs += 1  # of page 1, after the comparison
    watched.handed_out(pages[:1], watched.hand_outs - 1)
    watched.handed_out(pages[:2], watched.hand_outs)
    told = []

    def report(kind, page, describe, pool, look, i, *_):
        told.append(i)

    monkeypatch.setattr(it.tracer, "_report", report)
    enter(np.ones((2, 3), dtype=np.int64))
    assert told == [1, 2]
    assert not watched.looks


def test_the_host_does_not_wait_for_the_forward_that_runs(ahead):
    it = ahead()
    it.allocate("a", TOKENS)
    first = it.launch("a", tokens=it.row("a")[:TOKENS].long())
    it.launch("a", tokens=it.allocate("a", 1))
    behind = len(it.stream.queued)
    it.process(first)
    assert 0 < len(it.stream.queued) < behind  # what lies behind the first forward is done, no more


def test_what_the_device_has_not_reached_is_no_sealed_page(ahead):
    """Speculative decoding: a page is complete when the host knows what was accepted."""
    it = ahead()
    it.allocate("a", TOKENS)
    it.launch("a", tokens=it.row("a")[:TOKENS].long(), commits=False)
    it.launch("a", tokens=it.allocate("a", 4), commits=False)
    assert not it.tracer.pools["full"].sealed.any()
    it.requests["a"].kv_committed_len = TOKENS
    it.launch("a", tokens=it.row("a")[TOKENS : TOKENS + 4].long(), commits=False)
    assert it.tracer.pools["full"].sealed.sum() == 3
    it.idle()


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_a_page_is_sealed_as_soon_as_the_host_knows_what_was_accepted(ahead, pool):
    """And not one launch later: what the next forward does to the page is found."""
    it = ahead()
    it.allocate("a", 2 * PAGE - 2)
    it.launch("a", tokens=it.row("a")[: 2 * PAGE - 2].long())
    second = it.launch("a", tokens=it.allocate("a", 4), commits=False, verify=True)
    third = it.launch("a", tokens=it.row("a")[2 * PAGE :][:2].long(), commits=False, verify=True)
    it.process(second, a=2 * PAGE)
    page = it.page("a", 1, pool)
    assert it.tracer.pools[pool].sealed[page]
    it.stream.queued.append(lambda: it.buffer(pool)[page * PAGE + 4].add_(1.0))
    fourth = it.launch("a", tokens=it.allocate("a", 2), commits=False, verify=True)
    it.process(third, a=2 * PAGE + 1)
    with pytest.raises(TrapError) as error:
        it.process(fourth)
    assert error.value.finding.kind == "kv-changed"
    assert f"{pool.upper()} page {page}, " in error.value.finding.headline


def test_what_a_batch_will_write_that_is_not_launched_yet_is_not_sealed(ahead):
    """Without speculation a token counts as soon as its batch is prepared."""
    it = ahead()
    it.allocate("a", 2 * PAGE - 1)
    first = it.launch("a", tokens=it.row("a")[: 2 * PAGE - 1].long())
    tokens = it.allocate("a", 1)
    it.process(first, a=2 * PAGE)  # before the batch is launched, as with a grammar
    it.launch("a", tokens=tokens)
    it.launch("a", tokens=it.allocate("a", 1))
    it.idle()
    assert it.tracer.pools["full"].sealed.sum() == 2


def a_request_that_had_ended_is_launched(it):
    """SGLang processed the last result after it had prepared the batch, as with a grammar."""
    it.allocate("a", TOKENS)
    it.allocate("b", TOKENS)
    both = [it.row(r)[:TOKENS].long() for r in "ab"]
    first = it.launch("a", "b", tokens=both)
    tokens = [it.allocate("a", 1), it.allocate("b", 1)]
    it.process(first)
    page = it.page("a", 1)
    it.requests["gone"] = it.finish("a")
    it.launch("gone", "b", tokens=tokens)
    return page


def test_a_request_that_had_ended_may_be_launched_once_more(ahead):
    it = ahead()
    a_request_that_had_ended_is_launched(it)
    it.launch("c", tokens=it.allocate("c", 2 * TOKENS))
    it.idle()
    assert not it.tracer.context.disabled  # a released request has no lengths: nothing failed


def test_but_whoever_writes_after_that_launch_is_found(ahead):
    it = ahead(mode="log")
    page = a_request_that_had_ended_is_launched(it)
    it.stream.queued.append(lambda: it.buffer("full")[page * PAGE].fill_(3.0))
    it.idle()
    (finding,) = it.found()
    assert f"FULL page {page} was written after it was freed" in finding.headline


def test_a_page_that_is_somebodys_is_never_stamped(ahead):
    """Not even if a request that had ended is launched after its pages were handed out."""
    it = ahead()
    it.allocate("a", TOKENS)
    first = it.launch("a", tokens=it.row("a")[:TOKENS].long())
    void = it.allocate("a", 1)
    it.process(first)
    it.requests["gone"] = it.finish("a")
    mine = it.allocate("b", TOKENS)
    it.launch("gone", "b", tokens=[void[:0], mine])
    it.launch("b", tokens=it.allocate("b", 1))
    it.idle()
    assert not (it.buffer("full")[mine].view(torch.int16)[..., :4] == 0x2BAD).any()


def test_without_the_barrier_it_is_off(ahead, monkeypatch, caplog):
    monkeypatch.setitem(targets.SITES, "scheduler.war_barrier", (("", None),))
    it = ahead()
    assert not it.tracer.pools
    assert "overlap scheduling" in caplog.text
