"""A request's own row and length, which nobody changes between two of SGLang's own functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_forward_inputs import Step, request

from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks
from g4debug.tracers.spec_lifecycle.request_books import NOT_FOLLOWED
from g4debug.trapping.trap import TrapError

pytestmark = pytest.mark.skipif(
    targets.path("worker.seed_step") is not None or targets.sglang_version() is None,
    reason="the tracer of SGLang 0.5.14 and later",
)


class Server(Step):
    """Steps of two requests: each is prepared, run, and its result is processed."""

    def at(self, site: str, *args):
        return self.hooks._compose(site)(lambda *a: None, *args)

    def prepare(self, mode: str = "decode", grows: int = 0):
        def grow(batch):
            for r in batch.reqs:
                r.kv_allocated_len += grows

        self.hooks._compose(f"batch.prepare_for_{mode}")(grow, self.batch)

    def process(self):
        self.at("scheduler.process_result", None, self.batch, None)

    def step(self, **kwargs):
        self.prepare(**kwargs)
        self.run()
        self.process()


def test_what_sglang_does_itself_is_silent():
    it = Server()
    it.step(mode="extend")
    for _ in range(3):
        it.step(grows=1)
    a, b = it.batch.reqs
    a.is_retracted, a.req_pool_idx, a.kv_allocated_len = True, None, 0
    it.process()
    a.is_retracted, a.req_pool_idx, a.kv_allocated_len, a.retraction_count = False, 5, 12, 1
    it.batch.req_pool_indices[0] = 5
    it.process()  # of the step before, in which it had another row
    it.step(mode="extend")
    b.finished_reason, b.req_pool_idx, b.kv_allocated_len = "stop", None, 0
    it.process()
    it.at("cache.release", b)
    it.batch.reqs[1] = request("c", 1, 7)  # it gets the row that is free now
    it.step(mode="extend")


@pytest.mark.parametrize("field", ["req_pool_idx", "kv_allocated_len", "kv_committed_len"])
@pytest.mark.parametrize("off", [1, -1, -2, -4, 1 << 20])
@pytest.mark.parametrize("moment", ["decode", "run", "process"])
def test_a_number_that_is_overwritten_is_told_before_it_is_used(field, off, moment):
    it = Server()
    it.step(mode="extend")
    right = getattr(it.batch.reqs[1], field)
    if moment != "decode":
        it.prepare()
    setattr(it.batch.reqs[1], field, right + off)
    with pytest.raises(TrapError) as e:
        {"decode": it.prepare, "run": it.run, "process": it.process}[moment]()
    found = e.value.finding
    assert (found.kind, found.location.request, found.location.row) == ("bookkeeping", "b", 1)
    assert f"{field} = {right + off} ({off:+d}) for request b (row 1), should be {right}" in str(
        e.value
    )
    assert "overwritten since SGLang " in found.cause
    it.process()  # it is told once


def test_a_number_that_is_overwritten_while_a_step_is_made_does_not_accuse_the_batch():
    """The batch has the right row, and the request itself has not."""
    it = Server()
    it.step(mode="extend")
    it.prepare()
    made = it.batch.reqs[0]
    run, composed = it.run, it.hooks._compose

    def compose(site):
        if site == "future.resolve_lens":
            made.req_pool_idx = 1
        return composed(site)

    it.hooks._compose = compose
    with pytest.raises(TrapError) as e:
        run()
    assert e.value.finding.kind == "bookkeeping"
    assert "req_pool_idx = 1 (-2) for request a" in str(e.value)


@pytest.mark.parametrize(
    "hook", ["before_decode", "before_process", "after_prepare", "after_process"]
)
def test_where_a_hook_of_its_own_is_off_nobody_is_accused(hook, caplog):
    """What it knows would be old. The status says that it does not follow them any more."""
    it = Server()
    books = it.tracer.books
    it.hooks = Hooks()  # the same hooks but one
    books.context.hooks = it.hooks
    setattr(books, hook, lambda *args, **kwargs: args[0] if args else None)
    it.tracer.install()
    it.step(mode="extend")
    it.step(grows=1)
    for one in it.batch.reqs:
        one.kv_committed_len += 1
    it.prepare(grows=1)
    it.process()
    assert caplog.text.count(NOT_FOLLOWED[0]) == 1


def test_a_row_that_two_live_requests_have_is_told_when_it_is_given():
    it = Server()
    it.step(mode="extend")
    it.batch.reqs.append(request("c", 3, 5))
    with pytest.raises(TrapError) as e:
        it.prepare(mode="extend")
    assert "req_pool_idx = 3, which request a has, too for request c" in str(e.value)
    assert "the list of free rows had a row that a request still has" in e.value.finding.cause


def test_a_negative_length_of_evicted_tokens_is_told_before_a_release_hands_it_on():
    it = Server()
    it.step()
    one = it.batch.reqs[1]
    one.swa_evicted_seqlen = -64
    it.process()  # of a decode: nothing reads it
    with pytest.raises(TrapError) as e:
        it.at("cache.release", one)
    found = e.value.finding
    assert (found.kind, found.location.request) == ("bookkeeping", "b")
    assert "in release: swa_evicted_seqlen = -64 for request b" in str(e.value)
    assert "should be 0 or more" in str(e.value)
    assert "overwritten: SGLang begins with 0" in found.cause
    it.at("cache.release", one)  # it is told once


def test_a_negative_length_of_evicted_tokens_is_told_before_a_prefill_is_cached():
    it = Server("EXTEND")
    it.step(mode="extend")
    it.batch.reqs[1].swa_evicted_seqlen = -64
    with pytest.raises(TrapError, match="swa_evicted_seqlen = -64 for request b"):
        it.process()


def test_each_component_of_the_prefix_cache_has_a_length_of_evicted_tokens():
    it = Server()
    it.step(mode="extend")
    one = it.batch.reqs[0]
    one.kv = SimpleNamespace(component_evicted_seqlens={"swa": 64, "other": 0})
    it.at("cache.release", one)
    one.kv.component_evicted_seqlens["other"] = -1
    with pytest.raises(TrapError, match="swa_evicted_seqlen = -1 for request a"):
        it.at("cache.release", one)
