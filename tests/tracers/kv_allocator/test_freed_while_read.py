"""A full page of the prefix cache is freed while a running request reads it.

The pools, the allocator and the request table are SGLang's own (served_rows.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from real_backend import PAGE
from releases import kv_of
from served_rows import ARMED, Serving, it_row, late, release, row_of, running, tracer_of

from g4debug.dumps import reading
from g4debug.fixes import locked_prefix
from g4debug.hooking import targets
from g4debug.trapping.trap import TrapError

CACHED = PAGE  # tokens of each request that are the prefix cache's


@pytest.fixture
def serving(arm):
    """Requests a, b and c run. The first page of each was taken over by the prefix cache."""

    def make(mode="raise", cached=CACHED):
        folder = arm(**ARMED, G4DEBUG_MODE=mode)
        it = Serving(cached)
        running(it)
        return it, folder

    return make


def prefilled(it, *rids):
    """The result of these requests' prefill was processed."""
    requests = [it.requests[rid] for rid in rids or it.requests]
    for request in requests:
        request.finished = lambda: False
    batch = SimpleNamespace(
        reqs=requests, req_to_token_pool=it.rig.req_to_token,
        forward_mode=SimpleNamespace(is_extend=lambda: True),
    )  # fmt: skip
    tracer_of(it).after_process_result(None, None, batch)


def free_page(it, rid, column):
    """As the prefix cache does when it thinks that nobody reads the page."""
    tokens = it_row(it, it.requests[rid], (column + 1) * PAGE)[column * PAGE :]
    it.rig.allocator.free(tokens)


def grouped(it, rid, column):
    it.rig.allocator.free_group_begin()
    free_page(it, rid, column)
    it.rig.allocator.free_group_end()


@pytest.mark.parametrize("free", [free_page, grouped])
def test_it_is_told_when_it_is_freed(serving, free):
    it, _ = serving()
    prefilled(it)
    page = it.rig.page("b", 0)
    with pytest.raises(TrapError) as error:
        free(it, "b", 0)
    finding = error.value.finding
    assert finding.kind == "freed-while-read"
    assert finding.location.request == "b"
    assert f"FULL page {page} of the prefix cache is freed while request b reads it" in (
        finding.headline
    )
    assert f"in column 0 of row {row_of(it.requests['b'])} of req_to_token" in finding.got
    assert __name__.rpartition(".")[2] in finding.headline  # who called the allocator
    assert it.ledger.pools["full"].held[page]  # stopped before it happened
    assert reading.read(error.value.path).finding.kind == "freed-while-read"


def test_another_request_reads_it(serving):
    """c was lent b's first page; then b ends, and the page is freed."""
    it, _ = serving()
    page = it.rig.page("b", 0)
    it.write("c", 0, page)
    prefilled(it)
    release(it, "b", it_row(it, it.requests["b"], 100)[PAGE:])
    with pytest.raises(TrapError) as error:
        free_page(it, "b", 0)
    assert error.value.finding.kind == "freed-while-read"
    assert error.value.finding.location.request == "c"
    assert str(page) in error.value.finding.got


def _insert_helper(it):
    """The name of SGLang's function that did so up to 0.5.14."""
    it.rig.allocator.free(it_row(it, it.requests["b"], PAGE))


@pytest.mark.parametrize(
    "by", [_insert_helper, lambda it: free_page(it, "b", 0)], ids=["bug", "other"]
)
def test_the_report_names_the_fix_where_this_release_has_that_bug(serving, by):
    it, _ = serving()
    prefilled(it)
    with pytest.raises(TrapError) as error:
        by(it)
    finding = error.value.finding
    mended = by is _insert_helper and targets.matches(locked_prefix.FIX.needs)
    assert finding.reference.startswith("fix locked-prefix (sglang #29352") == mended
    assert ("G4DEBUG_FIX_LOCKED_PREFIX=1" in finding.next_command) == mended
    assert "contain" not in finding.next_command


def finished(it, request):
    request.finished = lambda: True


def released(it, request):
    release(it, request.rid, it_row(it, request, 100)[PAGE:])


def repointed(it, request):
    """The prefix cache had the same tokens already, and lent its own page instead."""
    it.write(request.rid, 0, it.rig.page("a", 1))


def retracted(it, request):
    request.retraction_count += 1


def of_a_session(it, request):
    request.session = object()
    prefilled(it, request.rid)


def of_a_shorter_prefix(it, request):
    kv_of(request).cache_protected_len = 0
    request.cache_protected_len = 0
    prefilled(it, request.rid)


@pytest.mark.parametrize(
    "happened",
    [finished, released, repointed, retracted, of_a_session, of_a_shorter_prefix],
)
def test_nobody_reads_it_any_more(serving, happened):
    it, _ = serving()
    prefilled(it)
    tokens = it_row(it, it.requests["b"], PAGE)
    happened(it, it.requests["b"])
    it.rig.allocator.free(tokens)
    assert not it.ledger.broken


def test_its_own_pages_may_be_freed_beyond_the_prefix(serving):
    it, _ = serving()
    prefilled(it)
    free_page(it, "b", 1)


def test_log_mode_tells_it_once(serving):
    it, folder = serving(mode="log")
    prefilled(it)
    grouped(it, "b", 0)
    kinds = [reading.read(path).finding.kind for path in folder.glob("*.pt")]
    assert kinds == ["freed-while-read"]


def test_copies_that_reach_the_host_later(serving, monkeypatch):
    """As on CUDA: reads and frees are entered in their order."""
    it, _ = serving()
    late(it, monkeypatch)
    prefilled(it)

    def freed():
        free_page(it, "b", 0)
        it.ledger.settle(wait=True)

    with pytest.raises(TrapError) as error:
        freed()
    assert error.value.finding.kind == "freed-while-read"


def test_who_leaves_before_the_copy_arrives_reads_nothing(serving, monkeypatch):
    it, _ = serving()
    tokens = it_row(it, it.requests["b"], PAGE)
    with monkeypatch.context() as here:
        late(it, here)
        prefilled(it)
        tracer_of(it).before_release(it.requests["b"])
        tracer_of(it).after_release(None)
        it.ledger.settle(wait=True)
    assert not tracer_of(it)._readers.of(tokens.numpy()[:1] // PAGE)
    it.rig.allocator.free(tokens)
