"""The page-table tracer on SGLang's real backend, pools, allocator and layers."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from real_backend import LAYERS, PAGE, Rig, draft_worker, dummy_pool

from g4debug import plugin
from g4debug.cpu import fault
from g4debug.dumps import reading
from g4debug.ledger import shadow as shadows
from g4debug.tracers.page_table import check
from g4debug.tracers.page_table.tracer import PageTableTracer
from g4debug.trapping.trap import TrapError

FAR = 10_000_000
DEBUG = {"G4DEBUG_TRACE": "page-table"}
TABLES = {"full": "page_table", "swa": "swa_page_table"}
MODES = ("decode", "target_verify", "extend")


def prepared(rig, mode="decode", tokens=(50, 100, 61)):
    """A backend with the metadata of a batch with rows that are not in the order of admission."""
    backend = rig.backend()
    a, b, c = (rig.admit(f"r{n}", n) for n in tokens)
    batch = rig.batch(mode, [c, a, b], backend)
    backend.init_forward_metadata(batch)
    return backend, batch


def corrupt(backend, pool, row, column, value=FAR):
    getattr(backend.forward_metadata, TABLES[pool])[row, column] = value


@pytest.fixture
def guarded(monkeypatch):
    """The pages of every pool that the guard was launched for, in order."""
    calls = []
    real = check.reference

    def spy(*args):
        calls.append(args[6])
        real(*args)

    monkeypatch.setattr(check, "reference", spy)
    return calls


def test_each_table_is_checked_once_per_forward_and_pool(arm, guarded):
    arm(**DEBUG)
    rig = Rig()
    full, swa = 640 // PAGE + 1, 320 // PAGE + 1
    backend, batch = prepared(rig)
    assert guarded == []
    rig.forward(backend, batch)
    assert guarded == [swa, full]  # layer 0 is sliding, layer 2 is full
    rig.forward(backend, batch)  # the same metadata again, as in a draft's loop: a new forward
    assert guarded == [swa, full] * 2
    for mode in MODES:
        rig.step(backend, mode, rig.requests[-3:])
    assert guarded == [swa, full] * 5
    draft = rig.backend(draft=True)
    worker, batch = draft_worker(rig, draft), rig.batch("decode", rig.requests[-3:], draft)
    worker._init_frozen_kv_metadata(batch)
    with worker._target_kv_pool_view(batch):
        rig.forward(draft, batch, save=False)
    rig.step(backend, "decode", rig.requests[-3:])
    assert guarded == [swa, full] * 7


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pool", TABLES)
def test_raise_mode_stops_before_the_kernel_and_says_where(arm, mode, pool):
    dumps = arm(**DEBUG)
    rig = Rig()
    backend, batch = prepared(rig, mode)
    corrupt(backend, pool, row=2, column=6)  # r100, 7 pages: its newest page
    with pytest.raises(TrapError) as error:
        rig.forward(backend, batch)
    assert fault.pending() is None
    where = error.value.finding.location
    assert (where.forward_mode, where.runner) == (mode.upper(), "target")
    assert (where.row, where.column) == (2, 6)
    assert where.layer_kind == {"full": "full", "swa": "sliding"}[pool]
    assert where.layer == next(i for i, sliding in LAYERS.items() if sliding == (pool == "swa"))
    assert str(FAR) in error.value.finding.headline
    assert str(error.value).startswith(error.value.finding.headline)
    (path,) = dumps.glob("*.pt")
    table = reading.read(path).table
    assert table.bad.tolist() == [[2, 6, FAR]]
    assert table.pool.name == pool
    assert table.seq_lens.tolist() == [61, 50, 100]
    # What belongs there is known, too: the page that SGLang's allocator gave to this request.
    token = rig.req_to_token.req_to_token[rig.requests[-2].req_pool_idx, 6 * PAGE]
    page = int(token) // PAGE
    if pool == "swa":
        page = int(rig.allocator.full_to_swa_index_mapping[token]) // PAGE
    assert error.value.finding.expected.endswith(f"for this cell, page {page}")


def test_a_layer_without_a_window_is_not_judged_in_a_swa_pool(arm):
    """As Llama-4's (``use_irope``), of which it is not known what they read."""
    dumps = arm(**DEBUG)
    rig = Rig()
    for number, layer in enumerate(rig.layers):
        if LAYERS[number]:
            layer.sliding_window_size = -1
    backend, batch = prepared(rig)
    handed = backend.forward_metadata.swa_page_table
    corrupt(backend, "swa", row=2, column=6)
    for number, layer in enumerate(rig.layers):
        table = backend._get_layer_page_table(layer, batch)
        assert (table is handed) is LAYERS[number]
    assert not list(dumps.glob("*.pt"))
    (limit,) = plugin.in_force.recorder.status.part("page-table").record().limits
    assert "without a window" in limit.what
    backend.init_forward_metadata(batch)
    corrupt(backend, "full", row=2, column=6)
    with pytest.raises(TrapError, match="full"):
        rig.forward(backend, batch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pool", TABLES)
def test_unguarded_the_same_cell_breaks_the_device(sglang, mode, pool):
    rig = Rig()
    backend, batch = prepared(rig, mode)
    corrupt(backend, pool, row=2, column=6)
    rig.forward(backend, batch)
    assert fault.pending() is not None
    assert (fault.pending().row, fault.pending().column, fault.pending().page) == (2, 6, FAR)


@pytest.mark.parametrize(
    ("pool", "row", "column"),
    [("full", 1, 5), ("swa", 1, 5), ("swa", 2, 2)],  # past the end; before the window of 40
)
def test_a_cell_that_no_kernel_reads_may_hold_anything(arm, pool, row, column):
    rig = Rig()
    backend, batch = prepared(rig)
    corrupt(backend, pool, row, column)
    rig.forward(backend, batch)
    assert fault.pending() is None  # unguarded: the kernel indeed does not read it
    arm(**DEBUG)
    rig.forward(backend, batch)


def test_the_edge_of_the_window_is_the_kernels(arm):
    """Column by column: the guard finds a bad page if and only if the kernel reads it."""
    rig = Rig()
    backend, batch = prepared(rig, "target_verify")
    read = []
    for column in range(7):
        saved = backend.forward_metadata.swa_page_table.clone()
        corrupt(backend, "swa", 2, column)
        rig.forward(backend, batch)
        read.append(fault.pending() is not None)
        fault.clear()
        backend.forward_metadata.swa_page_table.copy_(saved)
    assert True in read
    assert False in read
    arm(**DEBUG)
    found = []
    for column in range(7):
        saved = backend.forward_metadata.swa_page_table.clone()
        corrupt(backend, "swa", 2, column)
        try:
            rig.forward(backend, batch)
            found.append(False)
        except TrapError:
            found.append(True)
        backend.forward_metadata.swa_page_table.copy_(saved)
    assert found == read


def clean_outputs():
    rig = Rig()
    backend, batch = prepared(rig)
    torch.manual_seed(1)
    return rig.forward(backend, batch)


def test_contain_mode_hands_the_kernel_the_right_page(arm, caplog):
    clean = clean_outputs()
    dumps = arm(**DEBUG, G4DEBUG_MODE="contain")
    for _ in range(12):
        rig = Rig()
        backend, batch = prepared(rig)
        corrupt(backend, "full", 2, 6)
        torch.manual_seed(1)
        outputs = rig.forward(backend, batch)
        assert fault.pending() is None
        for output, right in zip(outputs, clean, strict=True):
            assert torch.equal(output, right)
    assert len(list(dumps.glob("*.pt"))) == 1
    headlines = [r for r in caplog.records if r.getMessage().startswith("g4debug: page-table")]
    assert [("(seen 10 times)" in r.getMessage()) for r in headlines] == [False, True]


def test_contain_mode_has_page_0_where_the_right_page_is_gone(arm):
    """And where ranges alone are judged: that is all that overlap scheduling leaves."""
    clean = clean_outputs()
    arm(**DEBUG, G4DEBUG_MODE="contain")
    for gone in (True, False):
        rig = Rig()
        if not gone:
            rig.runner = overlapped(rig.runner)
        backend, batch = prepared(rig)
        corrupt(backend, "full", 2, 6)
        if gone:
            ledger = plugin.in_force.ledger
            ledger.shadow[rig.page("r100", 6)] = shadows.FREE
        torch.manual_seed(1)
        outputs = rig.forward(backend, batch)
        assert fault.pending() is None
        for layer, output, right in zip(rig.layers, outputs, clean, strict=True):
            assert torch.equal(output[:2], right[:2])  # the other rows are served right
            if not gone:  # else the sliding layers have lost theirs, too
                assert torch.equal(output[2], right[2]) is LAYERS[layer.layer_id]


def overlapped(runner):
    def make(draft=False):
        made = runner(draft)
        made.server_args.disable_overlap_schedule = False
        return made

    return make


def test_log_mode_changes_nothing(arm, caplog):
    arm(**DEBUG, G4DEBUG_MODE="log")
    rig = Rig()
    backend, batch = prepared(rig)
    corrupt(backend, "full", 2, 6)
    handed = backend._get_layer_page_table(rig.layers[2], batch)
    assert handed is backend.forward_metadata.page_table
    rig.forward(backend, batch)
    assert fault.pending() is not None
    assert any("g4debug: page-table in target decode: full layer" in m for m in caplog.messages)


def test_a_sound_table_reaches_the_kernel_unchanged(arm, guarded):
    clean = clean_outputs()
    arm(**DEBUG)
    for output, right in zip(clean_outputs(), clean, strict=True):
        assert torch.equal(output, right)
    assert guarded  # it was looked at


def test_a_stale_draft_is_named_as_what_it_is(arm):
    arm(**DEBUG, G4DEBUG_FAULTS="stale-swa-state=on", G4DEBUG_FIX_SWA_STATE_SWAP="0")
    rig = Rig()
    draft = rig.backend(draft=True)
    request = rig.admit("r50", 50)
    worker = draft_worker(rig, draft)
    batch = rig.batch("decode", [request], draft, pool=dummy_pool())
    worker._init_frozen_kv_metadata(batch)
    assert draft.forward_metadata.swa_page_table is None  # not translated: that is the bug
    full_page = int(draft.forward_metadata.page_table[0, 1])
    with worker._target_kv_pool_view(batch), pytest.raises(TrapError) as error:
        rig.forward(draft, batch, save=False)
    finding = error.value.finding
    assert finding.location.runner == "draft"
    assert finding.location.layer_kind == "sliding"
    assert "gets full-pool page" in finding.headline
    assert f"but its SWA pool has {320 // PAGE + 1} pages" in finding.headline
    assert full_page > 320 // PAGE  # beyond the SWA pool, and the request's own
    assert "use_sliding_window_kv_pool=False, _swa_kv_pool=None" in finding.cause
    assert "swa-state-swap" in finding.reference
    assert "SWA_STATE_SWAP" in finding.next_command
    assert finding.kind == "full-index-in-swa-table"


def test_the_request_is_the_one_in_that_row(arm, monkeypatch):
    """Through the hooked run_batch; the batch's order is not the order of admission."""
    from sglang.srt.managers.scheduler import Scheduler

    rig = Rig()
    backend = rig.backend()
    a, b, c = (rig.admit(f"r{n}", n) for n in (50, 100, 61))
    seen = {}

    def run_batch(scheduler, batch):  # instead of a model: attention alone
        forward = rig.batch("decode", batch.reqs, backend)
        backend.init_forward_metadata(forward)
        corrupt(backend, "swa", seen["row"], 3)
        rig.forward(backend, forward)

    monkeypatch.setattr(Scheduler, "run_batch", run_batch)
    arm(**DEBUG)
    for step, (order, row) in enumerate((([c, a, b], 0), ([a, b, c], 2), ([b, c], 0)), 1):
        seen["row"] = row
        batch = SimpleNamespace(
            reqs=order,
            seq_lens_cpu=torch.tensor([r.tokens for r in order]),
            forward_mode=rig.batch("decode", order, backend).forward_mode,
            spec_info=None,
        )
        # b's column 3 of 7 lies in its window of 40 tokens, too: 100 - 1 - 39 = 60.
        with pytest.raises(TrapError) as error:
            Scheduler.run_batch(SimpleNamespace(), batch)
        assert error.value.finding.location.request == order[row].rid
        assert error.value.finding.location.step == step
        assert f"request {order[row].rid}, row {row}" in error.value.finding.headline
        rids = reading.read(error.value.path).table.rids
        assert rids == tuple(r.rid for r in order)


def test_a_bug_in_the_tracer_leaves_serving_as_it_is(arm, monkeypatch, caplog):
    clean = clean_outputs()
    arm(**DEBUG)

    def buggy(*args):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(check, "reference", buggy)
    for _ in range(2):
        for output, right in zip(clean_outputs(), clean, strict=True):
            assert torch.equal(output, right)
    said = [r for r in caplog.records if "after_page_table is off" in r.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.ERROR
    assert "page-table" in said[0].getMessage()


@pytest.mark.parametrize("mode", ["raise", "contain", "log"])
def test_a_finding_that_cannot_be_described_is_not_lost(arm, monkeypatch, caplog, mode):
    """The table was made safe: going on without a word would serve wrong tokens."""
    from g4debug.tracers.page_table import report as page_table_report

    def buggy(*args):
        raise KeyError("a bug in the report")

    monkeypatch.setattr(page_table_report, "read_table", buggy)
    arm(**DEBUG, G4DEBUG_MODE=mode)
    rig = Rig()
    backend, batch = prepared(rig)
    corrupt(backend, "full", 2, 6)
    if mode == "raise":
        with pytest.raises(TrapError, match=f"page {FAR} is out of range"):
            rig.forward(backend, batch)
    else:
        rig.forward(backend, batch)
    assert any(f"page {FAR} is out of range (row 2, column 6)" in m for m in caplog.messages)


def test_each_forward_outside_of_graphs_is_judged_by_its_own_rows(arm, guarded):
    """From the second one on, the launch of the forward before is used again."""
    arm(**DEBUG)
    rig = Rig()
    backend, batch = prepared(rig)
    rig.forward(backend, batch)
    a, b, c = rig.requests[-3:]
    batch = rig.batch("decode", [b, c, a], backend)  # the same requests in other rows: all right
    backend.init_forward_metadata(batch)
    rig.forward(backend, batch)
    assert len(guarded) == 4
    batch = rig.batch("decode", [c, b, a], backend)
    backend.init_forward_metadata(batch)
    corrupt(backend, "full", row=1, column=6)
    with pytest.raises(TrapError) as error:
        rig.forward(backend, batch)
    finding = error.value.finding
    assert (finding.location.row, finding.location.column) == (1, 6)
    assert finding.expected.endswith(f"for this cell, page {rig.page(b.rid, 6)}")


def test_a_check_in_a_graph_is_not_used_again(arm, monkeypatch):
    """It is replayed for ever with what it was captured with."""
    tracers, install = [], PageTableTracer.install
    monkeypatch.setattr(
        PageTableTracer, "install", lambda self: (tracers.append(self), install(self))[1]
    )
    arm(**DEBUG)
    rig = Rig()
    backend, batch = prepared(rig)
    rig.forward(backend, batch)
    checks = dict(tracers[0].checks)
    assert len(checks) == 2
    for it in checks.values():
        it.captured = True
    rig.step(backend, "decode", rig.requests[-3:])
    assert all(it.batch is batch for it in checks.values())


def test_rows_of_nobody_are_checked_for_ranges_only_and_that_is_said(arm):
    arm(**DEBUG)
    rig = Rig()
    backend, batch = prepared(rig)
    rig.forward(backend, batch)
    (status,) = (t for t in plugin.in_force.recorder.status.records() if t.name == "page-table")
    assert status.sound
    batch.req_pool_indices = batch.req_pool_indices[:2]  # of three rows
    rig.forward(backend, batch)
    (status,) = (t for t in plugin.in_force.recorder.status.records() if t.name == "page-table")
    assert [x.what for x in status.limits] == [
        "ranges only, where a forward has more rows than requests"
    ]
