"""The kv-allocator tracer on SGLang's real allocators: what it finds, and what it does then."""

from __future__ import annotations

import contextlib
import importlib.util
from types import SimpleNamespace

import pytest
import releases
import torch
from real_backend import FULL, PAGE, SWA, WINDOW, Rig
from releases import allocator_class, free_list, kv_of

from g4debug import plugin
from g4debug.dumps import reading
from g4debug.trapping.describe import located
from g4debug.trapping.trap import TrapError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
FAR = 10_000_000


@pytest.fixture
def armed(arm):
    """``armed(mode)``: a rig that is watched, in a mode: (rig, ledger, folder of the dumps)."""

    def make(mode="raise", page_size=None):
        folder = arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE=mode)
        return Rig(), plugin.in_force.ledger, folder

    return make


def tokens_of(rig, request, begin=0, end=None):
    row = rig.req_to_token.req_to_token[kv_of(request).req_pool_idx]
    return row[begin : request.tokens if end is None else end].to(torch.int64)


def findings(folder):
    return [reading.read(p).finding for p in sorted(folder.glob("*.pt"))]


def sound(rig, ledger):
    """No page is in a free list twice, and the ledger agrees with the lists."""
    for name in ("full", "swa"):
        allocator = getattr(rig.allocator, f"{name}_attn_allocator")
        free = free_list(allocator)
        assert len(free) == len(set(free))
        held = set(range(1, allocator.num_pages + 1)) - set(free)
        assert set(ledger.pools[name].held.nonzero()[0].tolist()) == held
    assert not ledger.broken


def poison(allocator, page):
    allocator.free_pages = allocator.free_pages.clone()
    allocator.free_pages[0] = page


def double_free(rig, a):
    rig.allocator.free(tokens_of(rig, a))
    rig.allocator.free(tokens_of(rig, a))


def free_unallocated(rig, a):
    page = int(rig.allocator.full_attn_allocator.free_pages[-1])
    rig.allocator.free(torch.arange(page * PAGE, (page + 1) * PAGE))


def free_out_of_range(rig, a):
    rig.allocator.full_attn_allocator.free(torch.tensor([FAR * PAGE]))


def free_page_zero(rig, a):
    rig.allocator.free(torch.zeros(3, dtype=torch.int64))


def mapping_to_another(rig, a):
    mapping = rig.allocator.full_to_swa_index_mapping
    mapping[tokens_of(rig, a, 0, PAGE)] = mapping[tokens_of(rig, a, PAGE, 2 * PAGE)]
    rig.allocator.free_swa(tokens_of(rig, a, 0, PAGE))


def mapping_lost(rig, a):
    rig.allocator.full_to_swa_index_mapping[tokens_of(rig, a, 0, PAGE)] = 0
    rig.allocator.free(tokens_of(rig, a, 0, PAGE))


FREES = {
    "double-free": double_free,
    "free-unallocated": free_unallocated,
    "out-of-range": free_out_of_range,
    "page-zero": free_page_zero,
    "mapping-mismatch": mapping_to_another,
    "mapping-mismatch ": mapping_lost,
}


@pytest.mark.parametrize("kind", FREES)
def test_a_bad_free_is_stopped_before_it_happens(armed, kind):
    rig, ledger, folder = armed()
    a = rig.admit("a", 3 * PAGE)
    with pytest.raises(TrapError) as error:
        FREES[kind](rig, a)
    (finding,) = findings(folder)
    assert finding == located(error.value.finding, plugin.in_force.recorder)
    assert finding.kind == kind.strip()
    assert finding.headline.startswith("g4debug: kv-allocator")
    assert "test_kv_allocator.py" in finding.headline
    if kind != "mapping-mismatch ":  # its full page is freed already
        sound(rig, ledger)


@pytest.mark.parametrize("kind", FREES)
def test_contain_keeps_bad_pages_out_of_the_free_list(armed, kind):
    rig, ledger, folder = armed("contain")
    a = rig.admit("a", 3 * PAGE)
    FREES[kind](rig, a)
    assert [f.kind for f in findings(folder)] == [kind.strip()]
    sound(rig, ledger)
    b = rig.admit("b", 5 * PAGE)  # and serving goes on
    rig.allocator.free(tokens_of(rig, b))
    sound(rig, ledger)


@pytest.mark.parametrize("kind", ["double-free", "free-unallocated"])
def test_log_only_reports(armed, kind):
    rig, _, folder = armed("log")
    a = rig.admit("a", 3 * PAGE)
    FREES[kind](rig, a)
    assert [f.kind for f in findings(folder)] == [kind]
    free = free_list(rig.allocator.full_attn_allocator)
    assert len(free) > len(set(free))  # as without us


def test_a_double_free_tells_the_pages_story(armed):
    rig, _, folder = armed("log")
    a = rig.admit("a", 2 * PAGE)
    page = int(tokens_of(rig, a)[0]) // PAGE
    double_free(rig, a)
    (path,) = folder.glob("*.pt")
    record = reading.read(path)
    assert [e.kind for e in record.events] == ["extend", "free", "free"]
    assert all(e.pages[0] == page for e in record.events)
    assert f"FULL page {page} was freed twice" in record.finding.headline
    assert "is free; it was held by" in record.finding.owner
    assert record.finding.site == "pool.free"
    assert record.finding.next_command


@pytest.mark.parametrize("pool", ["full", "swa"])
@pytest.mark.parametrize(
    ("page", "kind"), [(FAR, "out-of-range"), (-3, "out-of-range"), (0, "page-zero")]
)
def test_a_page_that_no_pool_has_is_handed_out(armed, pool, page, kind):
    rig, _, _ = armed()
    poison(getattr(rig.allocator, f"{pool}_attn_allocator"), page)
    with pytest.raises(TrapError) as error:
        rig.admit("a", 2 * PAGE)
    finding = error.value.finding
    assert finding.kind == kind
    assert f"{pool.upper()} page {page}" in finding.headline
    assert finding.location.layer_kind == {"full": "full", "swa": "sliding"}[pool]


@pytest.mark.parametrize("pool", ["full", "swa"])
@pytest.mark.parametrize("token", [FAR * PAGE, -3])
@pytest.mark.parametrize("at", [1, 2, PAGE, -1])  # in the page that it has, and in new ones
def test_a_token_that_no_pool_has_is_handed_out_inside_of_a_page(
    armed, monkeypatch, pool, token, at
):
    """SGLang uses it as an index right after, and dies: it is told before."""
    wrong = ""

    def handed_out(real):
        def method(allocator, *args, **kwargs):
            out = real(allocator, *args, **kwargs)
            if wrong and allocator is getattr(rig.allocator, f"{wrong}_attn_allocator"):
                out[at] = token
            return out

        return method

    inner = type(Rig().allocator.full_attn_allocator)
    monkeypatch.setattr(inner, "alloc_extend", handed_out(inner.alloc_extend))
    rig, _, _ = armed()
    a = rig.admit("a", PAGE + 2)
    wrong = pool
    with pytest.raises(TrapError) as error:
        grow(rig, a, "extend", 2 * PAGE)
    assert error.value.finding.kind == "out-of-range"
    assert f"{pool.upper()} page {token // PAGE}" in error.value.finding.headline


def test_a_held_page_is_handed_out_again(armed):
    rig, ledger, _ = armed()
    a = rig.admit("a", 2 * PAGE)
    page = int(tokens_of(rig, a)[0]) // PAGE
    poison(rig.allocator.full_attn_allocator, page)
    with pytest.raises(TrapError, match=f"page {page} was handed out while it is held") as error:
        rig.admit("b", 2 * PAGE)
    assert error.value.finding.kind == "double-alloc"
    assert f"page {page} is held by" in error.value.finding.owner
    assert ledger.pools["full"].held[page]


def grow(rig, request, kind="decode", tokens=1):
    """More tokens, as SGLang asks for them."""
    before, after = torch.tensor([request.tokens]), torch.tensor([request.tokens + tokens])
    last = tokens_of(rig, request)[-1:]
    if kind == "decode":
        found = rig.allocator.alloc_decode(after, after, last)
    else:
        found = rig.allocator.alloc_extend(before, before, after, after, last, tokens)
    row = rig.req_to_token.req_to_token[request.req_pool_idx]
    row[request.tokens : request.tokens + tokens] = found
    request.tokens += tokens


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_sequence_goes_on_in_a_page_that_is_free(armed, kind):
    rig, _, _ = armed()
    a = rig.admit("a", PAGE + 3)
    grow(rig, a, kind)
    rig.allocator.free(tokens_of(rig, a, PAGE))
    with pytest.raises(TrapError, match="is not held, but a sequence continues in it") as error:
        grow(rig, a, kind)
    assert error.value.finding.kind == "use-after-free"
    assert error.value.finding.site == f"pool.alloc_{kind}"


def test_a_sequence_goes_on_behind_an_evicted_swa_page(armed):
    """Its SWA slot is then 1: the reserved page 0 takes its KV."""
    rig, _, _ = armed()
    a = rig.admit("a", PAGE + 3)
    rig.allocator.free_swa(tokens_of(rig, a, PAGE))
    with pytest.raises(TrapError, match="SWA page 0 is not held"):
        grow(rig, a)


def test_the_mapping_of_a_page_that_a_sequence_goes_on_in(armed):
    rig, ledger, _ = armed()
    a = rig.admit("a", PAGE + 3)
    mapping = rig.allocator.full_to_swa_index_mapping
    page = int(tokens_of(rig, a)[-1]) // PAGE
    right = int(ledger.pools["full"].partner[page])
    other = int(mapping[tokens_of(rig, a)[0]]) // PAGE
    mapping[page * PAGE : page * PAGE + PAGE] += (other - right) * PAGE
    with pytest.raises(TrapError) as error:
        grow(rig, a)
    assert error.value.finding.kind == "mapping-mismatch"
    assert (
        f"page {page} has SWA page {right}, but the mapping says {other}" in error.value.finding.got
    )


def test_a_mapping_that_is_written_wrong(armed, monkeypatch):
    rig, _, _ = armed()
    real = type(rig.allocator.swa_attn_allocator).alloc_extend
    monkeypatch.setattr(  # between the pools' allocators and the mapping
        rig.allocator.swa_attn_allocator,
        "alloc_extend",
        lambda *a, **k: real(rig.allocator.swa_attn_allocator, *a, **k).roll(1),
    )
    with pytest.raises(TrapError) as error:
        rig.admit("a", 2 * PAGE)
    assert error.value.finding.kind == "mapping-mismatch"


def test_swa_pages_that_are_freed_behind_the_mapping(armed):
    rig, _, _ = armed()
    a = rig.admit("a", 2 * PAGE)
    swa = rig.allocator.full_to_swa_index_mapping[tokens_of(rig, a)]
    with pytest.raises(TrapError) as error:
        rig.allocator.swa_attn_allocator.free(swa)
    assert error.value.finding.kind == "maps-freed"


def test_a_mapping_to_a_freed_swa_page(armed):
    rig, _, _ = armed()
    a = rig.admit("a", 2 * PAGE)
    free = rig.allocator.swa_attn_allocator.free_pages[-1:] * PAGE
    with pytest.raises(TrapError) as error:
        rig.allocator.set_full_to_swa_mapping(tokens_of(rig, a, 0, PAGE), free + torch.arange(PAGE))
    assert error.value.finding.kind == "maps-freed"


# --- eviction ----------------------------------------------------------------------------


class Request(releases.Request):
    def finished(self):
        return self.done


class Serving:
    """A real ScheduleBatch's ``_evict_swa`` on the rig, with a real prefix cache."""

    def __init__(self, rig, ledger, tokens):
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        self.rig, self.ledger = rig, ledger
        self.request = Request(
            rid="a", done=False, kv_committed_len=tokens, retraction_count=0,
            cache_protected_len=0, swa_evicted_seqlen=0, req_pool_idx=None, tokens=tokens,
        )  # fmt: skip
        self.batch = ScheduleBatch.__new__(ScheduleBatch)
        self.batch.reqs = [self.request]
        self.batch.forward_mode = SimpleNamespace(name="EXTEND", is_extend=lambda: True)
        self.batch.req_to_token_pool = rig.req_to_token
        self.batch.token_to_kv_pool_allocator = rig.allocator
        self.batch.tree_cache = releases.prefix_cache(rig.req_to_token, rig.allocator, PAGE, WINDOW)
        ledger.batch = ledger.allocating = self.batch
        ledger.requests["a"] = self.request
        admitted = rig.admit("a", tokens)
        self.request.put(req_pool_idx=admitted.req_pool_idx, kv_allocated_len=tokens)

    def run(self):
        from sglang.srt.managers.scheduler import Scheduler

        fake = SimpleNamespace(enable_overlap=False)
        hook = plugin.in_force.hooks
        for entry in hook._entries["scheduler.run_batch"]:
            entry.around(lambda *a, **k: None, fake, self.batch)
        assert Scheduler.run_batch


@pytest.fixture
def serving(armed, monkeypatch):
    def make(tokens, mode="raise"):
        rig, ledger, folder = armed(mode)
        recorder = plugin.in_force.recorder
        monkeypatch.setattr(recorder, "record", lambda batch: None)
        serving = Serving(rig, ledger, tokens)
        serving.run()
        return serving, folder

    return make


TOKENS = 7 * PAGE + 5


@pytest.mark.parametrize("query", range(TOKENS - 2 * PAGE, TOKENS + 1))
def test_sglangs_own_eviction_is_silent(serving, query):
    it, folder = serving(TOKENS)
    it.request.put(kv_committed_len=query)
    it.batch._evict_swa(it.request, query)
    kept = releases.kept_behind(query, WINDOW, PAGE)
    assert releases.evicted(it.request) == max(0, kept // PAGE * PAGE)
    assert not findings(folder)


@pytest.mark.parametrize("query", range(TOKENS - 2 * PAGE, TOKENS + 1))
def test_the_last_page_that_may_go_and_the_first_that_may_not(serving, query):
    """Token by token: a query at q attends to q - window..q."""
    it, folder = serving(TOKENS)
    it.request.put(kv_committed_len=query)
    keep = (query - WINDOW) // PAGE  # the page of the oldest token that is attended to
    tokens = tokens_of(it.rig, it.request)
    it.rig.allocator.free_swa(tokens[: keep * PAGE])
    assert not findings(folder)
    with pytest.raises(TrapError, match="was evicted inside the window of request a") as error:
        it.rig.allocator.free_swa(tokens[keep * PAGE : (keep + 1) * PAGE])
    finding = error.value.finding
    assert finding.kind == "evicted-in-window"
    assert finding.location.request == "a"
    assert f"tokens {keep * PAGE}..{keep * PAGE + PAGE - 1} of request a" in finding.got


def finished(it):
    it.request.done = True


def gone(it):
    it.request.put(req_pool_idx=None)


def retracted_and_back(it):
    """In the same row, before it runs again: the row is an earlier life's."""
    it.request.retraction_count = 1


def another_page_in_its_row(it):
    """The prefix cache holds what the request had; its row points elsewhere by now."""
    it.run()
    it.rig.req_to_token.req_to_token[kv_of(it.request).req_pool_idx, : it.request.tokens] = 5 * PAGE


@pytest.mark.parametrize("happens", [finished, gone, retracted_and_back, another_page_in_its_row])
def test_pages_that_nobody_attends_to_may_go(serving, happens):
    it, folder = serving(TOKENS)
    tokens = tokens_of(it.rig, it.request)
    happens(it)
    it.rig.allocator.free_swa(tokens)
    assert not findings(folder)


def test_an_eviction_cannot_be_contained(serving):
    it, folder = serving(TOKENS, "contain")
    it.rig.allocator.free_swa(tokens_of(it.rig, it.request, TOKENS - 2 * PAGE))
    assert [f.kind for f in findings(folder)] == ["evicted-in-window"]
    sound(it.rig, it.ledger)


# --- other allocators ----------------------------------------------------------------------


def test_a_plain_paged_allocator(arm):
    folder = arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE="contain")
    allocator = allocator_class("pool.init")(FULL, PAGE, torch.float32, "cpu", None, False)
    found = allocator.alloc(3 * PAGE)
    allocator.free(found)
    assert not findings(folder)
    allocator.free(found[:1])
    assert [f.kind for f in findings(folder)] == ["double-free"]
    assert len(free_list(allocator)) == FULL // PAGE


def test_pages_of_one_token(arm):
    """There, SGLang takes the same index twice even in one free."""
    folder = arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE="contain")
    allocator = allocator_class("pool.init.token")(SWA, torch.float32, "cpu", None, False)
    found = allocator.alloc(5)
    allocator.free(torch.cat((found, found[1:3])))
    assert [f.kind for f in findings(folder)] == ["double-free"]
    assert free_list(allocator) == list(range(1, SWA + 1))
    poison(allocator, 0)
    allocator.alloc(1)
    assert [f.kind for f in findings(folder)] == ["double-free", "page-zero"]


def test_only_a_tail_has_swa_pages(armed):
    """Disaggregated decode: nothing is known of the pairs, so nothing is concluded."""
    rig, ledger, folder = armed()
    zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([4 * PAGE])
    last = torch.tensor([-1])
    found = rig.allocator.alloc_extend_swa_tail(zero, zero, length, length, last, 4 * PAGE, PAGE)
    rig.allocator.free(found)
    sound(rig, ledger)
    assert not findings(folder)


@pytest.mark.parametrize(("mode", "stopped"), [("raise", True), ("contain", True), ("log", False)])
def test_a_free_that_did_not_happen_is_told_apart(armed, mode, stopped):
    rig, _, folder = armed(mode)
    a = rig.admit("a", 3 * PAGE)
    with contextlib.suppress(TrapError):
        double_free(rig, a)
    records = [reading.read(p) for p in folder.glob("*.pt")]
    for record in records:
        assert [e.stopped for e in record.events if e.kind == "free"] == [False, stopped]
    assert records


def test_an_eviction_that_contain_mode_lets_happen_is_not_called_stopped(serving):
    it, folder = serving(TOKENS, "contain")
    it.request.put(kv_committed_len=TOKENS)
    it.rig.allocator.free_swa(tokens_of(it.rig, it.request, TOKENS - PAGE))
    (record,) = [reading.read(p) for p in folder.glob("*.pt")]
    assert record.finding.kind == "evicted-in-window"
    assert not record.events[-1].stopped
