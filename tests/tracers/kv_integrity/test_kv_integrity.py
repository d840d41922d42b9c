"""kv-integrity on SGLang's real KV pools, allocators and request table.

KV is written by the pool's own ``set_kv_buffer``; only the batch is a plain namespace.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import releases
import torch
from real_backend import DIM, LAYERS, PAGE, Rig
from releases import Request, allocator_class, kv_of, story

from g4debug import plugin, speculation
from g4debug.dumps import reading
from g4debug.hooking import targets
from g4debug.tracers.kv_integrity.tracer import KvIntegrityTracer, limits
from g4debug.trapping.trap import TrapError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
TOKENS = 3 * PAGE + 5
KNOWN_WORKERS = {adapter.name for adapter in speculation.adapters()}


def check_all(it) -> None:
    """What happens on a server that stays idle."""
    for _ in it.tracer.check_all():
        pass


class Serving:
    """Requests on a rig: prefill, decode, release, with KV written as a forward does."""

    def __init__(self, rig, tracer) -> None:
        self.rig, self.tracer, self.ledger = rig, tracer, tracer.ledger
        self.recorder = plugin.in_force.recorder
        self.recorder.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=rig.allocator, req_to_token_pool=rig.req_to_token
        )
        self.requests = {}

    def tokens(self, rid):
        request = self.requests[rid]
        row = self.rig.req_to_token.req_to_token[kv_of(request).req_pool_idx]
        return row[: kv_of(request).kv_allocated_len].long()

    def page(self, rid, column, pool="full"):
        return self.rig.page(rid, column, pool)

    def write(self, tokens, value=None):
        """One forward's KV of these tokens, in every layer."""
        for layer in self.rig.layers:
            k, v = (torch.randn(len(tokens), 1, DIM) for _ in "kv")
            if value is not None:
                k.fill_(value)
            releases.write_kv(self.rig.pool, layer, tokens, k, v)

    def admit(self, rid, tokens=TOKENS, value=None):
        self.recorder.step += 1
        request = Request(rid=rid)
        self.ledger.batch = self.ledger.allocating = SimpleNamespace(reqs=[request])
        admitted = self.rig.admit(rid, tokens)
        request.put(
            req_pool_idx=admitted.req_pool_idx, kv_committed_len=tokens, kv_allocated_len=tokens
        )
        self.requests[rid] = self.ledger.requests[rid] = request
        self.write(self.tokens(rid), value)
        self.run(rid)
        return request

    def decode(self, rid, count=1, value=None):
        """Token by token."""
        request, kv = self.requests[rid], kv_of(self.requests[rid])
        row = self.rig.req_to_token.req_to_token[kv.req_pool_idx]
        for _ in range(count):
            self.recorder.step += 1
            self.ledger.batch = self.ledger.allocating = SimpleNamespace(reqs=[request])
            length = torch.tensor([kv.kv_allocated_len + 1])
            last = row[kv.kv_allocated_len - 1 : kv.kv_allocated_len].long()
            token = self.rig.allocator.alloc_decode(length, length, last)
            row[kv.kv_allocated_len] = int(token)
            kv.kv_allocated_len += 1
            kv.kv_committed_len += 1
            self.write(token, value)
            self.run(rid)

    def run(self, *rids):
        reqs = [self.requests[r] for r in rids]
        self.tracer.after_run_batch(None, None, SimpleNamespace(reqs=reqs))

    def release(self, rid):
        self.rig.allocator.free(self.tokens(rid))
        self.rig.req_to_token.free(self.requests[rid])

    def buffers(self, pool):
        inner = getattr(self.rig.pool, f"{pool}_kv_pool")
        return inner.k_buffer, inner.v_buffer


@pytest.fixture
def tracers(monkeypatch):
    """Those that were put into this SGLang."""
    made = []
    install = KvIntegrityTracer.install
    monkeypatch.setattr(
        KvIntegrityTracer, "install", lambda self: (made.append(self), install(self))
    )
    return made


@pytest.fixture
def serving(arm, tracers):
    def make(mode="raise", trace="kv-integrity"):
        folder = arm(G4DEBUG_TRACE=trace, G4DEBUG_MODE=mode)
        (tracer,) = tracers
        it = Serving(Rig(), tracer)
        it.folder = folder
        return it

    return make


def findings(it):
    return [reading.read(p).finding for p in sorted(it.folder.glob("*.pt"))]


def bits(row):
    return row.view(-1).view(torch.int32)


# --- freed pages ---------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_a_write_into_a_freed_page_is_found_when_it_is_handed_out(serving, pool):
    it = serving()
    it.admit("a")
    page = it.page("a", 1, pool)
    step = it.recorder.step
    it.release("a")
    keys, values = it.buffers(pool)
    for buffer in (*keys, *values):
        buffer[page * PAGE + 7] = torch.randn(1, DIM)
    with pytest.raises(TrapError) as error:
        it.admit("b")
    finding = error.value.finding
    assert finding.kind == "write-after-free"
    assert f"{pool.upper()} page {page} was written after it was freed" in finding.headline
    assert "handed out again to request b" in finding.headline
    assert finding.location.request == "b"
    first = next(n for n, sliding in LAYERS.items() if sliding == (pool == "swa"))
    assert f"slot 7, K of layer {first}; {2 * len(keys)} rows" in finding.got
    assert f"freed in step {step}" in finding.expected
    assert f"page {page} was held by a; now b holds it" in finding.owner
    record = reading.read(error.value.path)
    assert story(record.events)[-3:] == ["extend", "free", "extend"]
    assert all(e.pages[0] == page for e in record.events)


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_a_write_into_a_freed_page_is_found_at_idle(serving, pool):
    it = serving("log")
    it.admit("a")
    page = it.page("a", 0, pool)
    it.release("a")
    check_all(it)
    assert not findings(it)
    it.buffers(pool)[1][-1][page * PAGE] = 1.0
    check_all(it)
    (finding,) = findings(it)
    assert (finding.kind, finding.site) == ("write-after-free", "scheduler.on_idle")
    assert "nobody holds it now" in finding.owner
    last = [n for n, sliding in LAYERS.items() if sliding == (pool == "swa")][-1]
    assert (finding.location.layer, finding.location.layer_kind) == (
        last,
        "sliding" if pool == "swa" else "full",
    )
    check_all(it)
    assert not it.tracer.context.disabled


def test_who_still_has_the_page_is_named(serving):
    """A page is freed under a request that goes on and writes."""
    it = serving()
    it.admit("a")
    page = it.page("a", 3)
    it.rig.allocator.free(it.tokens("a")[3 * PAGE :])
    it.write(it.tokens("a")[-1:])
    with pytest.raises(TrapError) as error:
        it.admit("b")
    assert f"page {page} was held by a; now b holds it; it is also in the row of a (column 3)" in (
        error.value.finding.owner
    )


def test_evicted_pages_are_stamped(serving):
    it = serving()
    it.admit("a")
    page = it.page("a", 0, "swa")
    full = it.tokens("a")[:PAGE]
    it.rig.allocator.free_swa(full)
    it.buffers("swa")[0][0][page * PAGE + 3] = 2.0
    with pytest.raises(TrapError, match=f"SWA page {page} was written after it was freed"):
        check_all(it)


def test_a_page_that_is_freed_twice_is_not_stamped_twice(serving):
    """By then it is somebody else's."""
    it = serving("log")
    it.admit("a")
    tokens = it.tokens("a").clone()
    it.release("a")
    it.admit("b")
    before = [b[it.tokens("b")].clone() for b in it.buffers("full")[0]]
    it.ledger.pools["full"].held[it.page("b", 0)] = False  # as after a free that was entered
    it.rig.allocator.free(tokens[:PAGE])
    after = [b[it.tokens("b")] for b in it.buffers("full")[0]]
    assert all(map(torch.equal, before, after))


def test_pages_that_another_tracer_kept_are_not_stamped(serving):
    """contain: kv-allocator leaves out pages that may not be freed; the stamp must, too."""
    it = serving("contain", "kv-integrity,kv-allocator")
    it.admit("a")
    it.admit("b", PAGE)
    swa = it.page("b", 0, "swa")
    before = it.buffers("swa")[0][0][swa * PAGE : (swa + 1) * PAGE].clone()
    # The mapping of a's page is corrupted: it leads to b's SWA page.
    first = it.tokens("a")[:PAGE]
    it.rig.allocator.full_to_swa_index_mapping[first] = torch.arange(swa * PAGE, (swa + 1) * PAGE)
    it.rig.allocator.free(first)
    assert [f.kind for f in findings(it)] == ["mapping-mismatch"]
    assert torch.equal(it.buffers("swa")[0][0][swa * PAGE : (swa + 1) * PAGE], before)


# --- live pages ----------------------------------------------------------------------------


def flip_a_bit(row):
    bits(row)[3] ^= 1


def put_nan(row):
    row.view(-1)[2] = float("nan")


@pytest.mark.parametrize("pool", ["full", "swa"])
@pytest.mark.parametrize("harm", [flip_a_bit, put_nan])
@pytest.mark.parametrize("seen", ["step", "free", "idle"])
def test_a_committed_page_that_changes_is_found(serving, pool, harm, seen):
    it = serving()
    it.admit("a")
    page = it.page("a", 1, pool)
    keys, _ = it.buffers(pool)
    harm(keys[1][page * PAGE + 4])
    with pytest.raises(TrapError) as error:
        {"step": it.decode, "free": it.release, "idle": lambda _: check_all(it)}[seen]("a")
    finding = error.value.finding
    layer = [n for n, sliding in LAYERS.items() if sliding == (pool == "swa")][1]
    assert finding.kind == "kv-changed"
    assert f"{pool.upper()} page {page}, K of layer {layer}, tokens 16..31 of request a" in (
        finding.headline
    )
    assert "only one buffer of one layer changed" in finding.cause
    nan = f"NaN or Inf in 1 rows, the first at KV slot 4, K of layer {layer}"
    assert (nan in finding.got) == (harm is put_nan)
    events = reading.read(error.value.path).events
    assert ("extend", "a") in [(e.kind, e.request) for e in events]


def test_somebody_elses_write_into_a_live_page(serving):
    it = serving()
    it.admit("a")
    it.admit("b")
    page = it.page("a", 0)
    it.decode("b")
    it.write(it.tokens("a")[3:4])  # through a wrong out_cache_loc
    with pytest.raises(TrapError) as error:
        it.decode("b")
    finding = error.value.finding
    assert f"FULL page {page}, K of layer 2, and 3 more of its 4 buffers" in finding.headline
    assert "somebody else wrote a token into the page" in finding.cause
    assert f"it still had it in step {it.recorder.step - 1}" in finding.expected


def test_nan_in_a_page_that_is_complete(serving):
    it = serving()
    it.admit("a", PAGE - 2)
    it.decode("a", value=float("inf"))  # not complete: not looked at yet
    with pytest.raises(TrapError) as error:
        it.decode("a")
    finding = error.value.finding
    assert finding.kind == "nan"
    assert finding.location.request == "a"
    assert f"KV slot {PAGE - 2}: token {PAGE - 2} of request a" in finding.headline


def test_pages_take_turns(serving, monkeypatch):
    monkeypatch.setattr("g4debug.tracers.kv_integrity.tracer.SAMPLE", 2 * PAGE)
    it = serving()
    it.admit("a", 8 * PAGE)
    flip_a_bit(it.buffers("full")[0][0][it.page("a", 7) * PAGE])
    with pytest.raises(TrapError, match=r"tokens 112\.\.127 of request a"):
        it.decode("a", 4)


# --- what is right ---------------------------------------------------------------------------


def test_a_server_that_works_is_silent(serving):
    it = serving("log")
    torch.manual_seed(1)
    for number in range(6):
        rid = f"r{number}"
        it.admit(rid, 20 + 7 * number)
        it.decode(rid, PAGE + 3)
        # Guesses beyond what is committed are written again and again.
        it.write(it.tokens(rid)[-1:])
        it.rig.allocator.free_swa(it.tokens(rid)[:PAGE])
        check_all(it)
        it.release(rid)
        it.write(torch.zeros(3, dtype=torch.int64))  # padding: slot 0 of page 0
    check_all(it)
    assert not findings(it)
    assert not it.tracer.context.disabled
    assert not it.ledger.broken


def test_it_did_look(serving):
    it = serving()
    it.admit("a", 4 * PAGE + 1)
    watched = it.tracer.pools["full"]
    assert watched.sealed.sum() == 4
    assert sorted(watched.filling) == [it.page("a", 4)]
    it.release("a")
    assert not watched.sealed.any()
    assert not watched.filling
    assert watched.stamped.sum() == 5
    assert watched.kv.stamped.sum() == 5
    it.rig.allocator.clear()
    assert not watched.stamped.any()
    assert not watched.kv.stamped.any()


def test_a_session_may_write_its_tail_anew(serving):
    it = serving()
    request = it.admit("a", PAGE - 1)
    request.session = object()
    it.decode("a", 2)
    assert not it.tracer.pools["full"].sealed.any()
    it.admit("b", PAGE - 1)
    it.decode("b", 2)  # the same without a session
    assert it.tracer.pools["full"].sealed.nonzero()[0].tolist() == [it.page("b", 0)]


@pytest.mark.parametrize(
    "argument",
    ["enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker",
     "radix_cache_backend", "enable_hisparse", "enable_unified_memory"],
)  # fmt: skip
def test_who_fills_pages_on_streams_of_its_own_would_be_accused(argument):
    """Such a page is handed out, and filled before the forward stream comes to look at it."""
    healthy = SimpleNamespace(disable_overlap_schedule=True, **{argument: None})
    assert limits(healthy) == []
    assert len(limits(SimpleNamespace(disable_overlap_schedule=True, **{argument: "x"}))) == 1


def test_where_it_cannot_judge_it_says_so_and_is_off(serving, caplog):
    it = serving("log")
    args = SimpleNamespace(disable_overlap_schedule=False, enable_hierarchical_cache=True)
    it.tracer.after_scheduler_init(None, SimpleNamespace(server_args=args))
    # Where SGLang has a barrier, it judges by launch (test_kv_overlap.py).
    by_launch = targets.path("scheduler.war_barrier") is not None
    assert ("overlap scheduling" in caplog.text) is not by_launch
    assert "hierarchical cache" in caplog.text
    it.admit("a")
    page = it.page("a", 0)
    it.release("a")
    it.buffers("full")[0][0][page * PAGE] = 1.0
    it.admit("b")
    check_all(it)
    assert not findings(it)


def test_a_pool_without_k_and_v(arm, tracers, caplog, monkeypatch):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    seen = []
    # Where all frees end in one place, that place is hooked.
    freed = "after_free" if targets.path("pool.release") is None else "after_release"
    for name in ("after_alloc", freed):
        real = getattr(KvIntegrityTracer, name)

        def hook(self, *args, _name=name, _real=real):
            seen.append(_name)
            return _real(self, *args)

        monkeypatch.setattr(KvIntegrityTracer, name, hook)
    arm(G4DEBUG_TRACE="kv-integrity")
    (tracer,) = tracers

    def allocate(pool):
        seen.clear()
        new = allocator_class("pool.init")
        allocator = new(8 * PAGE, PAGE, torch.float32, "cpu", pool, False)
        allocator.free(allocator.alloc(2 * PAGE))
        assert seen == ["after_alloc", freed]
        return [dict(tracer.pools), list(tracer.limits)]

    with_both = MHATokenToKVPool(8 * PAGE, PAGE, torch.float32, 1, DIM, 2, "cpu", False)
    pools, limits = allocate(with_both)
    assert (list(pools), limits) == (["full"], [])
    assert pools["full"].stamped.sum() == 2  # the freed ones
    tracer.pools.clear()
    pools, limits = allocate(None)
    why = "NoneType has neither k_buffer and v_buffer nor kv_buffer, with one tensor for each layer"
    assert (pools, limits) == ({}, [why])
    assert not caplog.records  # no hook failed
    args = SimpleNamespace(disable_overlap_schedule=True)
    tracer.after_scheduler_init(None, SimpleNamespace(server_args=args))
    assert caplog.text.count(f"it can check nothing on this server: {why}") == 1


def test_it_is_armed_by_its_name_only(arm):
    arm(SGLANG_TRTLLM_MHA_DEBUG="1")
    assert "kv-integrity" not in plugin.in_force.tracers
    assert "kv-allocator" in plugin.in_force.tracers


# --- a ledger that misses events -------------------------------------------------------------


@pytest.mark.parametrize("missed", ["free", "free and hand-out"])
def test_what_the_ledger_misses_is_no_finding(serving, monkeypatch, missed):
    """A sealed page changes its owner, and the ledger does not notice. Its new KV is right."""
    it = serving()
    it.admit("a")
    page = it.page("a", 0)
    with monkeypatch.context() as m:
        m.setattr(type(it.ledger), "enter", lambda self, pool, kind, pages, **_: pages)
        it.release("a")
        if missed == "free and hand-out":
            it.admit("b")
    if missed == "free":
        it.admit("b")
    assert it.page("b", 0) == page
    for _ in range(3):
        it.decode("b", PAGE)
    check_all(it)
    assert not findings(it)


def test_the_check_of_an_idle_server_goes_on_in_slices(serving, monkeypatch):
    from g4debug.hooking import idle_work

    it = serving()
    for rid in "abc":
        it.admit(rid)
    it.recorder.step += 1
    clock = iter(range(1000))
    monkeypatch.setattr(idle_work.time, "monotonic", lambda: float(next(clock)))
    scheduler = SimpleNamespace(is_fully_idle=lambda: True)
    calls = 0
    while it.tracer.idle.done != (it.recorder.step, it.ledger.serial):
        it.tracer.before_idle(scheduler)
        calls += 1
        assert calls < 100
    assert calls > 1
    it.tracer.before_idle(scheduler)  # idle goes on
    assert it.tracer.idle.work is None


# --- the pool of a draft -------------------------------------------------------------------


def drafting(it, name="EAGLE"):
    """A scheduler with a draft that has two layers and writes KV of its own, and its K and V."""
    pages = it.ledger.pools["full"].pages
    keys, values = ([torch.zeros(pages * PAGE, 1, DIM) for _ in range(2)] for _ in "kv")
    pool = SimpleNamespace(k_buffer=keys, v_buffer=values, dtype=torch.float32, start_layer=0)
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(disable_overlap_schedule=True),
        spec_algorithm=SimpleNamespace(
            name=name, is_none=lambda: False, is_frozen_kv_mtp=lambda: False
        ),
        draft_worker=SimpleNamespace(primary_draft_kv_pool=pool),
    )
    it.tracer.after_scheduler_init(None, scheduler)
    return keys, values


@pytest.mark.skipif("EAGLE" not in KNOWN_WORKERS, reason="EAGLE is known since 0.5.23 only")
@pytest.mark.parametrize("kind", ["kv-changed", "write-after-free"])
def test_the_kv_of_a_draft_is_watched_in_the_pages_of_the_target(serving, kind):
    it = serving()
    keys, _ = drafting(it)
    it.admit("a")
    page = it.page("a", 1)
    if kind == "write-after-free":
        it.release("a")
    keys[1][page * PAGE + 3] += 1.0
    with pytest.raises(TrapError) as error:
        check_all(it)
    finding = error.value.finding
    assert finding.kind == kind
    assert "K of layer 1 of the draft" in finding.headline
    assert finding.location.runner == "draft"


@pytest.mark.parametrize("name", ["OTHER"])
def test_a_draft_that_is_not_known_is_a_limit(serving, caplog, name):
    it = serving("log")
    drafting(it, name)
    assert "a draft's own KV is not watched" in caplog.text
    assert set(it.tracer.pools) == {"full", "swa"}
