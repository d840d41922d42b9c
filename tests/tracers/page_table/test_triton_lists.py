"""The lists that SGLang's real TritonAttnBackend hands over, in every mode, also in a graph."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from real_backend import PAGE, capture_graph, draft_worker, dummy_pool, replay_graph
from real_triton import WIDE, TritonRig
from triton_forward import TOKENS, Spec, batch_of, prepared, run

from g4debug import plugin
from g4debug.backends import adapter, triton
from g4debug.backends.handed_over import TokenLists
from g4debug.dumps import reading
from g4debug.hooking import targets
from g4debug.sanitizer.page_report import PageReport
from g4debug.sanitizer.trap_buffer import TrapBuffer
from g4debug.tracers.page_table import token_check
from g4debug.tracers.page_table.checked_table import CheckedTable
from g4debug.trapping.trap import TrapError

FAR = 640_000_000
DEBUG = {"G4DEBUG_TRACE": "page-table"}
MODES = ("decode", "target_verify", "extend")
LISTS = {"full": ("kv_indices", "kv_indptr"), "window": ("window_kv_indices", "window_kv_indptr")}


def checked():
    part = plugin.in_force.recorder.status.part("page-table")
    return {name: tally.count for name, tally in part.tallies.items()}, part.record().limits


@pytest.fixture
def guarded(monkeypatch):
    """(window, rows) of the lists that the guard was launched for, in order."""
    calls = []
    real = token_check.reference

    def spy(lists, *args):
        calls.append((lists.window >= 0, lists.rows))
        real(lists, *args)

    monkeypatch.setattr(token_check, "reference", spy)
    return calls


@pytest.mark.parametrize("mode", MODES)
def test_sound_lists_are_checked_once_for_each_kind_of_layer(arm, guarded, mode):
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig, mode)
    assert guarded == []
    run(rig, backend, batch)
    assert guarded == [(True, 3), (False, 3)]  # layer 0 is sliding, layer 2 is full
    run(rig, backend, batch)  # the same metadata again, as in a draft's loop: a new forward
    assert guarded == [(True, 3), (False, 3)] * 2
    counts, limits = checked()
    assert counts["token lists"] == 4
    assert limits == ()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LISTS)
def test_raise_mode_stops_before_the_kernel_and_says_where(arm, mode, name):
    dumps = arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig, mode)
    indices, indptr = (getattr(backend.forward_metadata, x) for x in LISTS[name])
    at = int(indptr[3]) - 1  # of r100: its newest token that is listed
    right, position = int(indices[at]), {"decode": 99, "target_verify": 95, "extend": 89}[mode]
    indices[at] = FAR
    with pytest.raises(TrapError) as error:
        run(rig, backend, batch)
    finding = error.value.finding
    where = finding.location
    assert (finding.kind, where.forward_mode) == ("out-of-range", mode.upper())
    assert (where.row, where.column) == (2, position)
    assert where.layer_kind == {"full": "full", "window": "sliding"}[name]
    assert finding.site == f"attn.triton.{'decode' if mode == 'decode' else 'extend'}"
    assert finding.expected.endswith(f"for this entry, token {right}")
    (path,) = dumps.glob("*.pt")
    table = reading.read(path).table
    assert table.bad.tolist() == [[2, position, FAR]]
    assert int(table.values[0, position - table.column0]) == FAR
    assert int(indices[at]) == right  # what would crash is mended in any case


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("way", "mended"), [("contain", True), ("log", False)])
def test_contain_mode_mends_a_wrong_token_and_log_mode_does_not(arm, mode, way, mended):
    arm(**DEBUG, G4DEBUG_MODE=way)
    rig = TritonRig()
    backend, batch = prepared(rig, mode)
    indices = backend.forward_metadata.kv_indices
    right = int(indices[3])
    indices[3] = right + 1  # the right page, and in it another token
    run(rig, backend, batch)
    assert (int(indices[3]) == right) is mended


@pytest.mark.parametrize(("value", "after"), [(1, 1), (10**6, 0)])
def test_watch_tells_a_wrong_indptr_and_leaves_it_where_a_kernel_stays_in_its_list(
    arm, value, after
):
    dumps = arm(SGLANG_TRTLLM_MHA_DEBUG="watch")
    rig = TritonRig()
    backend, batch = prepared(rig)
    indptr, splits = (
        getattr(backend.forward_metadata, name) for name in ("kv_indptr", "num_kv_splits")
    )
    right = int(indptr[1])
    indptr[1], splits[2] = right + value, 99
    run(rig, backend, batch)
    assert (int(indptr[1]), int(splits[2])) == (right + after, 99)
    kinds = {reading.read(path).finding.kind for path in dumps.glob("*.pt")}
    assert "list-bounds" in kinds


def test_the_window_s_tokens_in_the_full_list_and_the_other_way_round(arm):
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig)
    m = backend.forward_metadata
    m.kv_indices, m.window_kv_indices = m.window_kv_indices, m.kv_indices
    m.kv_indptr, m.window_kv_indptr = m.window_kv_indptr, m.kv_indptr
    with pytest.raises(TrapError) as error:
        run(rig, backend, batch)
    assert error.value.finding.kind == "list-bounds"


@pytest.mark.parametrize(
    ("field", "row", "value", "kind"),
    [
        ("kv_indptr", 1, 1, "list-bounds"),
        ("kv_indptr", 3, 10**6, "list-bounds"),
        ("kv_indptr", 0, 1, "list-bounds"),
        ("num_kv_splits", 1, 0, "kv-splits"),
        ("num_kv_splits", 2, 99, "kv-splits"),
    ],
)
def test_words_beside_the_entries_of_a_decode(arm, field, row, value, kind):
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig)
    getattr(backend.forward_metadata, field)[row] += value
    if field == "num_kv_splits":
        getattr(backend.forward_metadata, field)[row] = value
    with pytest.raises(TrapError) as error:
        run(rig, backend, batch)
    assert error.value.finding.kind == kind


@pytest.mark.parametrize(
    ("field", "row", "kind"),
    [("window_kv_offsets", 2, "window-offset"), ("mask_indptr", 1, "mask-bounds")],
)
def test_words_beside_the_entries_of_a_verify(arm, field, row, kind):
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig, "target_verify")
    getattr(backend.forward_metadata, field)[row] += 1
    with pytest.raises(TrapError) as error:
        run(rig, backend, batch)
    assert error.value.finding.kind == kind


def test_a_mask_that_is_too_short(arm):
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig, "target_verify")
    mask = backend.forward_metadata.custom_mask = backend.forward_metadata.custom_mask[:-1]
    with pytest.raises(TrapError) as error:
        run(rig, backend, batch)
    finding = error.value.finding
    assert finding.kind == "mask-bounds"
    assert f"but the mask has only {len(mask)} cells" in finding.headline
    assert finding.expected.startswith("a mask that holds the row's part, which begins at ")
    assert finding.got == f"a mask of {len(mask)} cells"


def in_graph(rig, backend, mode, requests):
    """Metadata of a graph that was captured with padding and is replayed with these requests.

    The ForwardBatch has static tensors, as SGLang's graph runners have. The last row is padding.
    """
    backend.init_cuda_graph_state(len(requests) + 1, 4 * len(requests) + 4)
    static = batch_of(rig, mode, [rig.admit("captured", 5)] * (len(requests) + 1), backend)
    static.req_pool_indices.zero_()
    static.seq_lens.fill_(1)
    if mode == "target_verify":  # a static mask is for GPUs
        static.spec_info = Spec()
    capture_graph(backend, static)
    live = batch_of(rig, mode, requests, backend)
    static.seq_lens[: len(requests)] = live.seq_lens
    static.req_pool_indices[: len(requests)] = live.req_pool_indices
    replay_graph(backend, static)
    return static


@pytest.mark.parametrize("mode", ["decode", "target_verify"])
def test_static_lists_of_a_graph(arm, mode):
    arm(**DEBUG)
    rig = TritonRig()
    backend = rig.backend()
    requests = [rig.admit(f"r{n}", n) for n in TOKENS]
    static = in_graph(rig, backend, mode, requests)
    run(rig, backend, static)
    assert checked()[0]["token lists"] == 2
    backend.cuda_graph_kv_indices[2] = FAR
    with pytest.raises(TrapError) as error:
        run(rig, backend, static)
    assert error.value.finding.kind == "out-of-range"
    assert error.value.finding.location.column == 2


@pytest.mark.parametrize("graph", [False, True])
def test_the_lists_of_a_draft(arm, graph):
    arm(**DEBUG)
    rig = TritonRig()
    backend = rig.backend(draft=True)
    requests = [rig.admit(f"r{n}", n) for n in TOKENS]
    worker = draft_worker(rig, backend)
    batch = rig.batch("decode", requests, backend, pool=dummy_pool())
    with worker._target_kv_pool_view(batch):
        if graph:
            batch = in_graph(rig, backend, "decode", requests)
        else:
            backend.init_forward_metadata(batch)
        run(rig, backend, batch, save=False)
        assert checked()[0]["token lists"] == 2
        backend.forward_metadata.window_kv_indices[0] = PAGE - 1
        with pytest.raises(TrapError) as error:
            run(rig, backend, batch, save=False)
    assert error.value.finding.kind == "page-zero"
    assert error.value.finding.location.runner == "draft"


def test_a_check_that_is_remembered_keeps_no_list():
    """With overlap scheduling some checks are remembered, and a list may have many megabytes."""
    indices = torch.zeros(1000, dtype=torch.int64)
    lists = TokenLists(indices, torch.zeros(3, dtype=torch.int32), torch.zeros(2))
    checked = CheckedTable(
        adapter=adapter("triton"), backend=None, layer=None, batch=None, table=indices,
        pool_name="full", pages=9, page_size=1, truth=None, mailbox=1, captured=False, lists=lists,
    )  # fmt: skip
    kept = checked.remembered()
    assert kept.lists.rows == 2
    for tensor in (kept.table, kept.lists.indices):
        assert tensor.untyped_storage().nbytes() == 0


def test_a_list_that_cannot_be_judged_is_told_once(arm):
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig)
    backend.dcp_size = 2
    adapter("triton").note(backend, batch, captured=False)
    backend.dcp_size = 1  # its own way of writing KV is not the matter here
    run(rig, backend, batch)
    counts, limits = checked()
    assert "token lists" not in counts
    (limit,) = limits
    assert "decode context parallelism" in limit.why


@pytest.mark.parametrize(("captured", "judged"), [(False, True), (True, False)])
def test_the_extend_of_a_draft_is_listed_as_a_prefill_is(arm, captured, judged):
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig, "extend")
    batch.forward_mode = SimpleNamespace(
        name="DRAFT_EXTEND_V2",
        is_decode_or_idle=lambda: False,
        is_target_verify=lambda: False,
    )
    adapter("triton").note(backend, batch, captured=captured)
    found = triton.built(backend.forward_metadata)
    assert (found.why == "") == (judged and targets.lists_draft_extend())
    if not found.why:
        assert found.lengths is batch.extend_prefix_lens


@pytest.mark.parametrize(("window", "sink"), [(0, 0), (32, 4)])
def test_a_draft_that_cuts_its_own_lists_is_not_judged(arm, window, sink):
    """--speculative-draft-window-size, of a draft that has KV of its own."""
    from sglang.srt.layers.attention import triton_backend

    if not hasattr(triton_backend, "resolve_draft_decode_window"):
        pytest.skip("no such argument in this release")
    folder = arm(**DEBUG)
    rig = TritonRig()
    one = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0)
    runner = rig.runner(True)
    runner.sliding_window_size = None
    runner.spec_algorithm = SimpleNamespace(is_frozen_kv_mtp=lambda: False, is_dspark=lambda: False)
    runner.token_to_kv_pool = rig.pool
    runner.kv_index_translator = rig.translator(rig.pool)
    with mock.patch.multiple(
        triton_backend,
        get_parallel=lambda: one,
        resolve_draft_decode_window=lambda of: (window, sink),
    ):
        draft = triton_backend.TritonMultiStepDraftBackend(runner, 1, 3)
    batch = rig.batch("decode", [rig.admit(f"r{n}", n) for n in TOKENS], draft.attn_backends[0])
    batch.seq_lens = batch.seq_lens - 3  # the draft's three tokens have places already
    batch.seq_lens_sum = int(batch.seq_lens.sum())
    batch.positions = batch.seq_lens.clone()
    names = ("kv_indptr", "kv_indices", "window_kv_indptr", "window_kv_indices")
    batch.spec_info = SimpleNamespace(**dict.fromkeys(names))
    batch.out_cache_loc = batch.out_cache_loc.repeat_interleave(3)
    draft.init_forward_metadata(batch)
    batch.out_cache_loc = batch.out_cache_loc[::3].contiguous()
    full = [x for x in rig.layers if x.sliding_window_size in (None, -1)]
    for backend in draft.attn_backends:
        for layer in full:
            q, kv = torch.zeros(3, layer.tp_q_head_num * WIDE), torch.zeros(3, 1, WIDE)
            backend.forward_decode(q, kv, kv, layer, batch, save_kv_cache=False)
    assert not list(folder.glob("*.pt"))
    counts, limits = checked()
    assert ("token lists" in counts) == (window == 0)
    assert ["--speculative-draft-window-size cuts its lists" in x.why for x in limits] == (
        [True] * (window > 0)
    )


@pytest.mark.parametrize("aligned", [False, True])
def test_deterministic_inference_prefills_sliding_layers_with_other_lists(aligned):
    """From 0.5.23 on; the kernels of such layers read other lists than the judged ones."""
    words = torch.zeros(2, dtype=torch.int32)
    metadata = SimpleNamespace(
        aligned_window_kv_indices=words if aligned else None,
        window_kv_indices=words.clone(),
        window_kv_indptr=words.clone(),
    )
    backend, said = SimpleNamespace(forward_metadata=metadata), []
    guard = SimpleNamespace(
        not_guarded=lambda what, why: said.append(why), judged_in_part=lambda backends, phases: None
    )
    layer = SimpleNamespace(sliding_window_size=63)
    assert adapter("triton").lists(backend, layer, guard) is None
    assert ("deterministic" in said[0]) is aligned


def test_the_report_speaks_of_tokens_and_not_of_pages(arm):
    dumps = arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig)
    backend.forward_metadata.kv_indices[3] = FAR
    with pytest.raises(TrapError):
        run(rig, backend, batch)
    (path,) = dumps.glob("*.pt")
    shown = subprocess.run(
        [sys.executable, "-m", "g4debug", "show", path],
        env={**os.environ, "COLUMNS": "110"},
        capture_output=True,
        text=True,
    ).stdout
    assert "TOKEN LIST as the kernel would have got it" in shown
    assert re.search(r"rows x \d+ tokens", shown)
    assert "full pool: tokens 0..655" in shown
    assert "PAGE TABLE" not in shown


@pytest.mark.parametrize("mode", ["decode", "target_verify"])
@pytest.mark.parametrize("broken", ["report", "record"])
def test_a_finding_that_says_little_names_the_site_of_the_lists_all_the_same(
    arm, monkeypatch, mode, broken
):
    """Either the report fails, or what the guard has left cannot be read."""
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig, mode)
    backend.forward_metadata.kv_indices[3] = FAR
    if broken == "report":
        monkeypatch.delattr(PageReport, "holder")
    else:
        take = TrapBuffer.take

        def spoilt(self):
            return [replace(left, record=left.record._replace(kind=99)) for left in take(self)]

        monkeypatch.setattr(TrapBuffer, "take", spoilt)
    with pytest.raises(TrapError) as error:
        run(rig, backend, batch)
    finding = error.value.finding
    assert finding.kind == ("out-of-range" if broken == "report" else "unreadable")
    assert finding.site == f"attn.triton.{'decode' if mode == 'decode' else 'extend'}"
