"""pool-leak on SGLang's real allocators, request table and prefix cache.

Only the scheduler around them is a plain namespace: it is what a census reads them from.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace

import pytest
import releases
import torch
from real_backend import PAGE, WINDOW, Rig
from releases import kv_of, story

from g4debug import plugin
from g4debug.dumps import reading
from g4debug.tracers.pool_leak.tracer import PoolLeakTracer
from g4debug.tracers.pool_leak.watch import IdleCounts
from g4debug.trapping.trap import TrapError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]


class Server:
    """A rig with a real prefix cache, seen as a scheduler."""

    def __init__(self, context) -> None:
        self.rig = Rig()
        self.ledger = context.ledger
        self.tracer = PoolLeakTracer(context)
        self.ledger.listen(self.tracer.taken_again.listen, "extend")
        self.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=self.rig.allocator,
            req_to_token_pool=self.rig.req_to_token,
            tree_cache=releases.prefix_cache(
                self.rig.req_to_token, self.rig.allocator, PAGE, WINDOW
            ),
            server_args=SimpleNamespace(speculative_eagle_topk=1),
            is_fully_idle=lambda: True,
        )
        # The rig's first request took its pages before this server was there: not ours.
        other = self.rig.requests.pop()
        row = self.rig.req_to_token.req_to_token[other.req_pool_idx]
        held = self.ledger.pools["full"].held.nonzero()[0]
        self.rig.allocator.free(torch.from_numpy(held * PAGE))
        row.zero_()
        self.rig.req_to_token.free(other)

    def admit(self, rid: str, tokens: int, session: object = None):
        request = Request(rid, tokens, session)
        self.ledger.batch = self.ledger.allocating = SimpleNamespace(reqs=[request])
        request.put(req_pool_idx=self.rig.admit(rid, tokens).req_pool_idx)
        self.ledger.requests[rid] = request
        return request

    def tokens(self, request) -> torch.Tensor:
        table = self.rig.req_to_token.req_to_token
        kv = kv_of(request)
        return table[kv.req_pool_idx, : kv.kv_allocated_len].to(torch.int64)

    def release(self, request) -> None:
        self.rig.req_to_token.free(request)

    def check(self, idle: bool = True) -> None:
        self.tracer.check(self.scheduler, idle)


class Request(releases.Request):
    def __init__(self, rid: str, tokens: int, session: object) -> None:
        super().__init__(rid, kv_allocated_len=tokens, session=session)

    def finished(self) -> bool:
        return True


@pytest.fixture
def server(arm):
    from g4debug.settings import Settings
    from g4debug.tracers.base import Context
    from g4debug.trapping.trap import Trap

    folder = arm(G4DEBUG_TRACE="pool-leak")
    recorder = plugin.in_force.recorder
    settings = Settings(debug_dir=folder)
    from g4debug.trapping.describe import Describer

    trap = Trap(settings, Describer(recorder))
    return Server(
        Context(
            "pool-leak", plugin.in_force.hooks, settings, recorder, trap, plugin.in_force.ledger
        )
    )


def found(server, **kwargs) -> TrapError:
    with pytest.raises(TrapError) as error:
        server.check(**kwargs)
    return error.value


def test_a_life_without_a_leak(server):
    server.check()
    one = server.admit("one", 5 * PAGE + 3)
    server.check(idle=False)
    tokens = server.tokens(one)
    server.rig.allocator.free_swa(tokens[: 2 * PAGE])  # behind its window
    server.check(idle=False)
    tree = server.scheduler.tree_cache
    releases.insert(tree, range(5 * PAGE), tokens[: 5 * PAGE], swa_evicted=2 * PAGE)
    server.check(idle=False)  # cached and owned at once
    server.rig.allocator.free(tokens[5 * PAGE :])
    server.release(one)
    server.check()  # cached only
    server.rig.allocator.free_group_begin()
    two = server.admit("two", PAGE)
    server.rig.allocator.free(server.tokens(two))
    server.release(two)
    server.check()  # on its way back
    server.rig.allocator.free_group_end()
    server.check()
    assert server.tracer.censuses == 7


def test_a_lost_free_names_pages_owner_and_what_was_due(server):
    one = server.admit("one", 3 * PAGE)
    server.admit("two", PAGE)
    pages = (server.tokens(one)[::PAGE] // PAGE).tolist()
    server.tracer.before_release(one, None)
    server.release(one)  # the row is given back, the pages are not
    error = found(server, idle=False)
    assert error.finding.kind == "leaked"
    assert f"3 pages of the full pool are neither free, cached nor owned (page {pages[0]}" in str(
        error
    )
    record = reading.read(error.path)
    (holding,) = record.holdings
    assert (holding.owner, holding.count, holding.pages) == ("one", 3, tuple(sorted(pages)))
    assert "release_kv_cache in step 0" in holding.due
    assert story(record.events) == ["extend", "free", "extend"][-len(story(record.events)) :]
    # The SWA pool next, then nothing that was told already.
    assert "of the swa pool" in str(found(server, idle=False))
    server.check(idle=False)


def test_a_page_that_is_free_and_in_use(server):
    one = server.admit("one", 3 * PAGE)
    server.rig.allocator.free(server.tokens(one)[PAGE : 2 * PAGE])
    error = found(server, idle=False)
    assert error.finding.kind == "double"
    assert "free and in use at once" in str(error)


def test_a_page_twice_in_the_free_list(server):
    allocator = server.rig.allocator.swa_attn_allocator
    allocator.free_pages = torch.cat([allocator.free_pages, allocator.free_pages[:1]])
    assert found(server).finding.kind == "repeated"
    allocator.free_pages = torch.cat([allocator.free_pages[:-1], torch.tensor([4711])])
    assert found(server).finding.kind == "outside"


def test_a_row_that_an_idle_server_still_holds(server):
    server.admit("one", PAGE)
    server.check(idle=False)
    error = found(server)
    assert error.finding.kind == "row"
    assert "request one" in str(error)
    server.check()  # told once


def test_the_pages_of_a_session_are_its_running_requests(server):
    one = server.admit("one", 3 * PAGE, session=SimpleNamespace(streaming=False))
    server.check(idle=False)
    server.rig.allocator.free(server.tokens(one)[PAGE:])
    one.put(kv_allocated_len=PAGE)
    server.check(idle=False)
    lost = int(server.tokens(one)[0]) // PAGE
    server.release(one)
    error = found(server, idle=False)
    assert error.finding.kind == "leaked"
    assert f"page {lost}, last owner one" in str(error)


class Clock:
    """``time.monotonic``, as a test wants it: each look at it takes ``tick`` seconds."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 1000.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def clock(monkeypatch):
    from g4debug.tracers.pool_leak import tracer

    clock = Clock()
    monkeypatch.setattr(tracer.time, "monotonic", clock)
    return clock


def test_when_it_counts(server, clock):
    recorder, scheduler = server.tracer.context.recorder, server.scheduler
    for step in range(1, 601):
        recorder.step = step
        server.tracer.after_result(None, scheduler)
    assert server.tracer.censuses == 2  # every 256 steps
    server.tracer.before_idle(scheduler)
    server.tracer.before_idle(scheduler)  # idle goes on
    assert server.tracer.censuses == 3
    scheduler.is_fully_idle = lambda: False
    recorder.step += 1
    server.tracer.before_idle(scheduler)
    assert server.tracer.censuses == 3


def test_a_server_that_stands_is_counted_once(server, clock):
    """Requests wait, and no step is run: after five seconds all pages are counted."""
    scheduler, recorder = server.scheduler, server.tracer.context.recorder
    scheduler.is_fully_idle = lambda: False
    for step, censuses in ((1, 1), (2, 2)):
        recorder.step = step
        server.tracer.before_idle(scheduler)
        clock.now += 4.9
        server.tracer.before_idle(scheduler)
        assert server.tracer.censuses == censuses - 1
        for _ in range(3):
            clock.now += 5.0
            server.tracer.before_idle(scheduler)
        assert server.tracer.censuses == censuses


def test_a_request_that_takes_its_first_pages_again_is_counted_at_once(server, clock):
    """Upstream #36855: nobody owns the pages of the chunk before."""
    one = server.admit("one", 3 * PAGE)
    server.tracer.after_result(None, server.scheduler)
    assert server.tracer.censuses == 0
    server.release(one)  # the row only: its pages are nobody's now
    server.admit("one", 3 * PAGE)
    with pytest.raises(TrapError, match="neither free, cached nor owned") as error:
        server.tracer.after_result(None, server.scheduler)
    assert "last owner one" in str(error.value)


def test_a_request_that_goes_on_is_no_sign(server, clock):
    one = server.admit("one", 3 * PAGE)
    pool = server.ledger.pools["full"]
    server.tracer.after_result(None, server.scheduler)
    server.rig.allocator.free(server.tokens(one))  # and one that gave its pages back before
    server.release(one)
    again = server.admit("one", 3 * PAGE)
    server.tracer.after_result(None, server.scheduler)
    assert server.tracer.censuses == 0
    assert pool.held[server.tokens(again)[0].item() // PAGE]


def test_a_page_that_the_pool_does_not_have_is_no_sign_and_no_error(server, clock):
    """What a broken allocator gave: the ledger must not be lost to it."""
    pool = server.ledger.pools["full"]
    for rid, wrong in (("one", pool.pages), ("two", -1), ("three", 0)):
        pool.ends_in(rid, wrong)
        server.admit(rid, PAGE)
        assert not server.tracer.taken_again.seen()
    assert not server.ledger.broken


def busy_censuses(server, clock, every):
    """How many are made in 100 rounds of as many steps, a second each, if one takes 2 s."""
    settings = server.tracer.context.settings
    server.tracer.context.settings = dataclasses.replace(settings, leak_steps=every)
    for turn in range(1, 101):
        server.tracer.context.recorder.step = turn * every
        clock.now += 1.0
        clock.tick = 2.0
        server.tracer.after_result(None, server.scheduler)
        clock.tick = 0.0
    return server.tracer.censuses


def test_a_busy_server_does_not_pay_for_more_than_a_share(server, clock):
    assert busy_censuses(server, clock, every=256) == 1


def test_who_asks_for_often_gets_it(server, clock):
    assert busy_censuses(server, clock, every=1) == 100


def fill_the_cache(server, nodes):
    for n in range(nodes):
        request = server.admit(f"r{n}", PAGE)
        releases.insert(server.scheduler.tree_cache, [n + 1] * PAGE, server.tokens(request))
        server.release(request)


def test_a_count_on_an_idle_server_goes_on_in_slices(server, clock, monkeypatch):
    """The requests that arrive meanwhile are looked for between two slices."""
    from g4debug.ledger import cache_tree

    monkeypatch.setattr(cache_tree, "NODES", 1)
    fill_the_cache(server, 5)
    server.tracer.context.recorder.step = 1
    clock.tick = 1.0  # longer than a slice: each call makes one step
    calls = 0
    while not server.tracer.censuses:
        server.tracer.before_idle(server.scheduler)
        calls += 1
    # The unified cache lists all of its pages in one call, without a pause.
    assert calls > (1 if hasattr(server.scheduler.tree_cache, "tree_components") else 5)
    server.tracer.before_idle(server.scheduler)
    assert server.tracer.censuses == 1


def test_a_count_begins_anew_if_anything_changed(server, clock, monkeypatch):
    from g4debug.ledger import cache_tree

    monkeypatch.setattr(cache_tree, "NODES", 1)
    fill_the_cache(server, 5)
    clock.tick = 1.0
    server.tracer.before_idle(server.scheduler)
    begun = server.tracer.idle.work
    server.tracer.before_idle(server.scheduler)
    assert server.tracer.idle.work is begun
    server.scheduler.tree_cache.reset()  # as flush_cache does
    server.rig.allocator.clear()
    server.tracer.before_idle(server.scheduler)
    assert server.tracer.idle.work is not begun
    while not server.tracer.censuses:  # the old look would have called the flushed pages owned
        server.tracer.before_idle(server.scheduler)


def test_sglangs_own_check_fails_while_a_count_goes_on(server, clock):
    """Then the count is brought to its end, so that the finding names the pages."""
    lost = server.admit("one", 2 * PAGE)
    server.release(lost)
    clock.tick = 1.0
    server.tracer.ledger.holders.scheduler = server.scheduler
    server.tracer.before_idle(server.scheduler)
    assert not server.tracer.censuses
    with pytest.raises(TrapError, match="2 pages of the full pool are neither free"):
        server.tracer.at_idle_error()


def test_a_row_in_use_of_a_request_that_nobody_has_shown_us(server):
    """As disaggregated decode reserves them: its pages are not lost."""
    reserved = server.rig.admit("not seen", 3 * PAGE)
    server.check(idle=False)
    page = int(server.rig.req_to_token.req_to_token[reserved.req_pool_idx, PAGE]) // PAGE
    server.rig.req_to_token.req_to_token[reserved.req_pool_idx, PAGE : 2 * PAGE] = 0
    error = found(server, idle=False)  # now nobody names it
    assert f"(page {page}, last owner a request that is not known)" in str(error)


def test_a_request_that_nobody_has_shown_us_and_the_scheduler_runs(server):
    """Its length is known then, so what its row has behind that is lost."""
    request = server.admit("one", 3 * PAGE)
    server.ledger.requests.clear()
    server.scheduler.running_batch = SimpleNamespace(reqs=[request])
    server.check(idle=False)
    request.put(kv_allocated_len=PAGE)
    assert found(server, idle=False).finding.kind == "leaked"


def test_two_requests_that_claim_one_row(server):
    """Nobody knows which request's length counts, so nothing is called lost."""
    server.admit("one", 3 * PAGE)
    other = Request("other", PAGE, None)
    other.put(req_pool_idx=kv_of(server.ledger.requests["one"]).req_pool_idx)
    server.ledger.requests["other"] = other
    server.check(idle=False)


def test_an_unknown_prefix_cache_is_said_and_not_guessed_at(server, caplog):
    server.scheduler.tree_cache = SimpleNamespace()
    server.admit("one", PAGE)
    server.check()
    server.check()
    assert caplog.text.count("whose prefix cache is SimpleNamespace") == 1
    assert server.tracer.censuses == 0


@pytest.mark.parametrize("part", [PoolLeakTracer, IdleCounts])
def test_a_server_that_it_cannot_judge_is_told_at_start(server, part):
    """And not at its first count: the line at start would call it judged until then."""
    context = server.tracer.context
    tracer, args = part(context), server.scheduler.server_args
    tracer.after_scheduler_init(None, server.scheduler)
    assert not context.status.is_off
    args.pp_size = 2
    part(context).after_scheduler_init(None, server.scheduler)
    assert context.status.is_off
    (said,) = (r.off for r in context.recorder.status.records() if r.name == "pool-leak")
    assert said.startswith("with pipeline parallelism several batches run at once")


def test_the_canary_bites(tmp_path, monkeypatch):
    from g4debug.tracers.base import CanaryError
    from g4debug.tracers.pool_leak import canary as pool_leak_canary

    assert "found the page that was lost" in pool_leak_canary.fire(tmp_path, torch.device("cpu"))
    monkeypatch.setattr(PoolLeakTracer, "check", lambda *args, **kwargs: None)
    with pytest.raises(CanaryError, match="not found"):
        pool_leak_canary.fire(tmp_path, torch.device("cpu"))


def test_what_is_wrong_already_does_not_hide_what_goes_wrong_later(server):
    one, two = server.admit("one", 2 * PAGE), server.admit("two", PAGE)
    (page,) = (server.tokens(two)[::PAGE] // PAGE).tolist()
    inner = server.rig.allocator.full_attn_allocator
    spare = int(inner.free_pages[-1])
    inner.free_pages = torch.cat([inner.free_pages, torch.tensor([page])])
    assert found(server, idle=False).finding.kind == "double"
    server.check(idle=False)  # it is told once
    inner.free_pages = inner.free_pages[inner.free_pages != spare]  # and now one is lost, too
    error = found(server, idle=False)
    assert (error.finding.kind, f"(page {spare}," in str(error)) == ("leaked", True)
    inner.free_pages = torch.cat([inner.free_pages, torch.tensor([spare])])
    server.check(idle=False)
    inner.free_pages = torch.cat([inner.free_pages, torch.tensor([spare])])
    error = found(server, idle=False)  # the same page, and another thing is wrong with it
    assert (error.finding.kind, f"(page {spare}," in str(error)) == ("repeated", True)
    assert one.rid == "one"


def test_a_page_that_was_freed_and_left_the_free_list_is_not_said_to_wait_for_its_release(server):
    one = server.admit("one", PAGE)
    (page,) = (server.tokens(one)[::PAGE] // PAGE).tolist()
    server.tracer.before_release(one, None)
    server.rig.allocator.free(server.tokens(one))
    server.release(one)
    server.check()
    inner = server.rig.allocator.full_attn_allocator
    for name in ("free_pages", "release_pages"):
        pages = getattr(inner, name, None)
        if pages is not None:
            setattr(inner, name, pages[pages != page])
    error = found(server)
    assert (error.finding.kind, f"(page {page}," in str(error)) == ("leaked", True)
    assert "is not in the free list any more" in error.finding.cause


@pytest.mark.parametrize(("row", "wrong"), [(0, 0), (1 << 20, 1 << 20), (-1, -1)])
def test_what_is_no_row_in_the_list_of_free_rows_is_told(server, row, wrong):
    server.check()
    server.scheduler.req_to_token_pool.free_slots.insert(0, row)
    error = found(server)
    assert error.finding.kind == "row-repeated"
    assert f"no request may have it (row {wrong})" in str(error)
    server.check()  # once


def test_a_length_that_is_too_short_is_the_cause_of_what_lies_behind_it(server):
    one = server.admit("one", 3 * PAGE)
    kv = kv_of(one)
    last = int(server.tokens(one)[2 * PAGE]) // PAGE
    kv.kv_allocated_len = 2 * PAGE
    server.ledger.holders.scheduler = server.scheduler
    error = found(server, idle=False)
    assert (error.finding.kind, f"(page {last}," in str(error)) == ("leaked", True)
    assert f"its kv_allocated_len is {2 * PAGE}" in error.finding.cause


@pytest.mark.parametrize("given", [{"checkpoint": False}, {"is_insert": False}])
def test_a_release_into_the_free_list_alone_is_called_so(server, given):
    one = server.admit("one", PAGE)
    server.tracer.before_release(one, None, **given)
    server.release(one)
    (holding,) = reading.read(found(server, idle=False).path).holdings
    assert holding.due.endswith("into the free list")
