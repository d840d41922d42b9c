"""Each kind of wrong page on SGLang's real backend: its name, its words, and no false alarm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_backend import PAGE, SWA, Rig, draft_worker, dummy_pool

from g4debug import plugin, speculation
from g4debug.dumps import reading
from g4debug.hooking import targets
from g4debug.trapping.describe import located
from g4debug.trapping.trap import TrapError

DEBUG = {"G4DEBUG_TRACE": "page-table"}
TOKENS = {"a": 50, "b": 100, "c": 61}
COLUMN = {"a": 3, "b": 6, "c": 3}  # the newest page of each
TABLES = {"full": "page_table", "swa": "swa_page_table"}


@pytest.fixture
def rig(arm):
    return a_rig(arm)


def a_rig(arm, **environ):
    """Three requests; the ledger knows by name who has their pages."""
    arm(**DEBUG, **environ)
    rig = Rig()
    ledger = plugin.in_force.ledger
    for rid, tokens in TOKENS.items():
        ledger.batch = ledger.allocating = SimpleNamespace(reqs=[SimpleNamespace(rid=rid)])
        rig.admit(rid, tokens)
    ledger.batch = ledger.allocating = None
    recorder = plugin.in_force.recorder
    recorder._rids = {r.req_pool_idx: r.rid for r in rig.requests}
    return rig


def prepared(rig, mode="decode", draft=False):
    backend = rig.backend(draft)
    if draft:
        backend.token_to_kv_pool = rig.pool  # what the views do in 0.5.13
    batch = rig.batch(mode, rig.requests[1:], backend)
    backend.init_forward_metadata(batch)
    return backend, batch


def found(rig, backend, batch, save=True):
    with pytest.raises(TrapError) as error:
        rig.forward(backend, batch, save=save)
    record = reading.read(error.value.path)
    assert record.finding == located(error.value.finding, plugin.in_force.recorder)
    return error.value.finding, record


def put(backend, pool, rid, value):
    row = list(TOKENS).index(rid)
    getattr(backend.forward_metadata, TABLES[pool])[row, COLUMN[rid]] = value


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
@pytest.mark.parametrize("pool", TABLES)
@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("negative", "negative"),
        ("far", "out-of-range"),
        ("zero", "page-zero"),
        ("other", "other-request"),
        ("free", "stale"),
        ("own", "mismatch"),
    ],
)
def test_a_wrong_page_is_named_by_its_cause(rig, mode, pool, wrong, kind):
    backend, batch = prepared(rig, mode)
    ledger = plugin.in_force.ledger
    free = int((~ledger.pools[pool].held[1:]).nonzero()[0][-1]) + 1
    values = {
        "negative": -1,
        "far": 10**6,
        "zero": 0,
        "other": rig.page("a", 3, pool),
        "free": free,
        "own": rig.page("b", 5, pool),
    }
    put(backend, pool, "b", values[wrong])
    finding, record = found(rig, backend, batch)
    right = rig.page("b", 6, pool)
    where = finding.location
    assert finding.kind == kind
    assert (where.request, where.row, where.column) == ("b", 1, 6)
    assert where.forward_mode == mode.upper()
    assert finding.expected.endswith(f"for this cell, page {right}")
    assert finding.got == f"page {values[wrong]} (1 bad cell in the table)"
    assert record.table.bad.tolist() == [[1, 6, values[wrong]]]
    if wrong == "other":
        assert "gets page" in finding.headline
        assert f"of request a, but the right {pool.upper()} page is {right}" in finding.headline
        assert "handed out to request a" in finding.owner
    about = values[wrong] if wrong in ("other", "free", "own") else right
    assert [e.pages[0] for e in record.events] == [about] * len(record.events)
    assert len(finding.history) == len(record.events)
    if wrong != "free":  # of a page that nobody ever had there is nothing to tell
        assert any(e.kind == "extend" for e in record.events)
        assert "test_page_table_kinds.py" not in finding.headline
    else:
        assert "was never handed out" in finding.owner


def test_a_full_pool_page_in_a_swa_table(rig):
    """Inside the SWA pool's range, where it faults nothing: the draft reads somebody else's KV."""
    backend, batch = prepared(rig, draft=True)
    swa, full = rig.page("b", 6, "swa"), rig.page("b", 6)
    assert full > SWA // PAGE  # the rig's full pages are beyond the SWA pool ...
    put(backend, "swa", "b", full)
    finding, _ = found(rig, backend, batch, save=False)
    assert finding.kind == "full-index-in-swa-table"
    low = 1  # ... so let req_to_token name a low one, held by the same request
    request = rig.requests[2]
    rig.req_to_token.req_to_token[request.req_pool_idx, 6 * PAGE : 7 * PAGE] = torch.arange(
        low * PAGE, (low + 1) * PAGE, dtype=torch.int32
    )
    rig.allocator.full_to_swa_index_mapping[low * PAGE : (low + 1) * PAGE] = torch.arange(
        swa * PAGE, (swa + 1) * PAGE
    )
    plugin.in_force.ledger.shadow[low] = swa
    backend.init_forward_metadata(batch)
    rig.forward(backend, batch, save=False)  # sound so far
    backend.init_forward_metadata(batch)
    put(backend, "swa", "b", low)
    finding, record = found(rig, backend, batch, save=False)
    assert finding.kind == "full-index-in-swa-table"
    says = f"sliding layer 0 gets full-pool page {low}, but the right SWA page is {swa}"
    assert says in finding.headline
    assert "although the backend translates" in finding.cause  # not the upstream regression
    assert "swa-state-swap" not in finding.reference + finding.next_command
    assert finding.location.runner == "draft"
    assert {e.pool for e in record.events} == {"full"}


def test_a_swa_page_in_the_full_table_is_no_page_of_the_request(rig):
    backend, batch = prepared(rig)
    value = rig.page("b", 6, "swa")
    put(backend, "full", "b", value)
    finding, _ = found(rig, backend, batch)
    assert finding.kind in ("mismatch", "other-request", "stale")
    assert f"the right FULL page is {rig.page('b', 6)}" in finding.headline


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
def test_use_after_free(rig, mode):
    """The tables agree with req_to_token, which keeps a freed page's number."""
    page = rig.page("b", 6)
    rig.allocator.free(torch.arange(page * PAGE, (page + 1) * PAGE))
    backend, batch = prepared(rig, mode)
    finding, record = found(rig, backend, batch)
    assert finding.kind == "use-after-free"
    assert f"reads full-pool page {page}, which is free" in finding.headline
    assert [e.kind for e in record.events][-2:] == ["extend", "free"]
    assert "test_page_table_kinds.py" in finding.history[-1]
    assert "contain" not in finding.next_command


def test_evicted_in_window(rig):
    page, swa = rig.page("b", 6), rig.page("b", 6, "swa")
    rig.allocator.free_swa(torch.arange(page * PAGE, (page + 1) * PAGE))
    backend, batch = prepared(rig)
    finding, record = found(rig, backend, batch)
    assert finding.kind == "evicted-in-window"
    assert finding.location.layer_kind == "sliding"
    assert "needs tokens 96..111 in its window" in finding.headline
    # From 0.5.18 on the page leaves the mapping first, which is an event of its own.
    assert [e.kind for e in record.events if e.kind not in ("map", "unmap")][-2:] == [
        "extend",
        "evict",
    ]
    assert all(e.pages[0] == swa and e.pool == "swa" for e in record.events)


def test_what_is_evicted_behind_the_window_is_nobodys_business(rig):
    row = rig.req_to_token.req_to_token[rig.requests[2].req_pool_idx]
    rig.allocator.free_swa(row[: 2 * PAGE].to(torch.int64))  # 100 tokens, window of 40
    for mode in ("decode", "target_verify", "extend"):
        backend, batch = prepared(rig, mode)
        rig.forward(backend, batch)


@pytest.mark.parametrize("pool", TABLES)
def test_a_row_that_is_too_short(rig, pool):
    backend, batch = prepared(rig)
    metadata = backend.forward_metadata
    name = TABLES[pool]
    setattr(metadata, name, getattr(metadata, name)[:, :6].contiguous())
    finding, record = found(rig, backend, batch)
    assert finding.kind == "row-too-short"
    assert "reads 7 pages of a row that has only 6" in finding.headline
    assert (finding.location.request, finding.location.row) == ("b", 1)
    assert len(record.table.bad) == 0
    assert record.table.columns_total == 6


def test_a_padding_row_is_nobodys(rig):
    """Slot 0 of req_to_token is SGLang's padding; its tokens are all 0."""
    backend = rig.backend()
    batch = rig.batch("decode", rig.requests[1:], backend)
    batch.req_pool_indices[1] = 0
    backend.init_forward_metadata(batch)
    used = -(-int(batch.seq_lens[1]) // PAGE)
    assert int(backend.forward_metadata.page_table[1, :used].sum()) == 0
    rig.forward(backend, batch)


def test_of_a_ledger_that_gave_up_nothing_is_concluded(rig):
    page = rig.page("b", 6)
    rig.allocator.free(torch.arange(page * PAGE, (page + 1) * PAGE))
    plugin.in_force.ledger.give_up("a test")
    backend, batch = prepared(rig)
    rig.forward(backend, batch)
    put(backend, "full", "b", 1)  # req_to_token needs no ledger
    finding, _ = found(rig, backend, batch)
    assert finding.kind == "mismatch"
    assert finding.owner == ""


def test_without_a_shadow_the_mapping_is_the_truth(rig):
    plugin.in_force.ledger.shadow = None
    backend, batch = prepared(rig)
    rig.forward(backend, batch)
    put(backend, "swa", "b", rig.page("b", 6, "swa") + 1)
    finding, _ = found(rig, backend, batch)
    assert finding.location.layer_kind == "sliding"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "disable_overlap_schedule",
            False,
            "with --disable-overlap-schedule to have everything checked",
        ),
        ("disaggregation_mode", "decode", "disaggregated"),
        ("enable_pdmux", True, "--enable-pdmux"),
    ],
)
def test_where_pages_change_under_a_forward_only_ranges_are_checked(
    arm, monkeypatch, caplog, name, value, says
):
    from sglang.srt.managers.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "__init__", lambda self: None)
    # With SGLang's barrier, overlap is no reason: test_forward_snapshots.py.
    monkeypatch.setitem(targets.SITES, "scheduler.war_barrier", (("", None),))
    # Of this Scheduler nobody can tell what it runs, so it would be refused.
    rig = a_rig(arm, G4DEBUG_NOT_RUN_ON_THIS_RELEASE="1")
    runner = rig.runner

    def other(draft=False):
        made = runner(draft)
        setattr(made.server_args, name, value)
        return made

    rig.runner = other
    backend, batch = prepared(rig)
    put(backend, "full", "b", rig.page("a", 0))
    rig.forward(backend, batch)
    put(backend, "full", "b", -7)
    finding, _ = found(rig, backend, batch)
    assert finding.kind == "negative"
    Scheduler()  # when it is built, all backends are
    assert [m for m in caplog.messages if "page-table is limited: ranges only" in m and says in m]


@pytest.mark.parametrize("algorithm", ["EAGLE", "another"])
def test_a_draft_with_kv_of_its_own_and_a_page_that_is_free(rig, monkeypatch, algorithm):
    """It is told, but not where a draft may write after restore_state, or is not known."""
    page = rig.page("b", 6)
    rig.allocator.free(torch.arange(page * PAGE, (page + 1) * PAGE))
    runner = rig.runner

    def other(draft=False):
        made = runner(draft)
        made.server_args.speculative_algorithm = algorithm
        monkeypatch.setattr(made.spec_algorithm, "name", algorithm, raising=False)
        return made

    rig.runner = other
    backend, batch = prepared(rig, draft=True)
    layers = [x for x in rig.layers if x.layer_id in (2, 4)]
    known = {adapter.name for adapter in speculation.adapters()}
    if algorithm in known and not targets.restores_pages():
        with pytest.raises(TrapError, match="free"):
            rig.forward(backend, batch, layers)
    else:
        rig.forward(backend, batch, layers)


def test_the_frozen_drafts_views(rig):
    """Metadata in one view, attention in the other; the draft's own pool is a dummy."""
    draft = rig.backend(draft=True)
    worker = draft_worker(rig, draft)
    batch = rig.batch("decode", rig.requests[1:], draft, pool=dummy_pool())
    worker._init_frozen_kv_metadata(batch)
    with worker._target_kv_pool_view(batch):
        rig.forward(draft, batch, save=False)
        put(draft, "swa", "b", rig.page("a", 3, "swa"))
        finding, _ = found(rig, draft, batch, save=False)
    assert finding.kind == "other-request"
    assert finding.location.runner == "draft"
