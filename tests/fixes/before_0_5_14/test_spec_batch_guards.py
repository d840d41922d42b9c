"""spec-batch-guards on SGLang's real ScheduleBatch, Req and draft inputs."""

from __future__ import annotations

import logging

import pytest
import spec_batch
import torch
from spec_batch import batch, draft_input, request

from g4debug.fixes.before_0_5_14 import spec_batch_guards

pytestmark = pytest.mark.written_for("spec-batch-guards")

ALONE = {"G4DEBUG_FIX_IDLE_DRAFT_INPUT": "0"}
OFF = {**ALONE, "G4DEBUG_FIX_SPEC_BATCH_GUARDS": "0"}


@pytest.fixture
def args(sglang, monkeypatch):
    made = spec_batch.server_args()
    monkeypatch.setattr("sglang.srt.server_args._global_server_args", made)
    monkeypatch.setattr(spec_batch_guards, "_said", set())
    return made


def plain(spec_info, row):
    """A plain row: zero hidden state, the request's last token everywhere."""
    assert not spec_info.hidden_states[row].any()
    return int(spec_info.bonus_tokens[row]) == int(spec_info.topk_index[row, 0])


def own(spec_info, row):
    """A row that the worker made."""
    token = int(spec_info.bonus_tokens[row])
    return bool((spec_info.hidden_states[row] == token).all())


WRONG = {
    "verify input": spec_batch.verify_input,
    "draft-extend input": spec_batch.extend_input,
    "nothing": lambda: None,
    "idle": lambda: _idle(),
    "a row too many": lambda: draft_input([request("x", 1), request("y", 2), request("z", 3)]),
}


def _idle():
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput

    return FrozenKVMTPDraftInput.create_idle_input(
        "cpu", 64, torch.float32, spec_batch.TOPK, CaptureHiddenMode.LAST
    )


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("side", ["running", "new", "both"])
def test_merge_gives_every_live_request_its_row(arm, args, caplog, wrong, side):
    arm(**ALONE)
    running = batch(args, [request("a", 7, done=True), request("b", 8), request("c", 9)])
    running.spec_info = draft_input(running.reqs[1:])  # as a verify leaves it
    new = batch(args, [request("d", 10)], mode="EXTEND")
    for which, broken in (("running", running), ("new", new)):
        if side in (which, "both"):
            broken.spec_info = WRONG[wrong]()
    with caplog.at_level(logging.WARNING, "g4debug"):
        running.merge_batch(new)
        running.filter_batch(v1_spec_info_filtered=True)
    assert [r.rid for r in running.reqs] == ["b", "c", "d"]
    rows = running.spec_info
    assert rows.bonus_tokens.tolist() == [8, 9, 10]
    assert rows.hidden_states.shape == (3, 64)
    assert rows.topk_p.shape == rows.topk_index.shape == (3, spec_batch.TOPK)
    check = {"running": (plain, plain, own), "new": (own, own, plain), "both": (plain,) * 3}[side]
    assert [c(rows, i) for i, c in enumerate(check)] == [True] * 3
    assert running.seq_lens.tolist() == [4, 4, 4]
    (said,) = {r.getMessage().split(";")[0] for r in caplog.records}
    assert "in merge_batch got" in said
    assert "live requests" in said


@pytest.mark.parametrize("wrong", ["verify input", "draft-extend input", "nothing"])
def test_a_side_where_all_finished_counts_as_idle_and_is_no_news(arm, args, caplog, wrong):
    arm(**ALONE)
    drained = batch(args, [request("a", 7, done=True)], rows=WRONG[wrong]())
    with caplog.at_level(logging.WARNING, "g4debug"):
        drained.merge_batch(batch(args, [request("b", 8)], mode="EXTEND"))
    assert drained.spec_info.bonus_tokens.tolist() == [8]
    assert own(drained.spec_info, 0)
    assert not caplog.records


def test_merge_without_the_guard(arm, args):
    """What it guards against: a crash; and, worse, rows that nobody notices are missing."""
    arm(**OFF)
    running = batch(args, [request("b", 8)], rows=spec_batch.verify_input())
    with pytest.raises(AttributeError, match="merge_batch"):
        running.merge_batch(batch(args, [request("d", 10)]))
    running = batch(args, [request("b", 8)], rows=_idle())
    running.merge_batch(batch(args, [request("d", 10)]))
    assert len(running.spec_info.topk_p) == 1  # for two live requests: b goes on from 10
    assert running.spec_info.bonus_tokens.tolist() == [10]


@pytest.mark.parametrize("wrong", [w for w in WRONG if w != "nothing"])
@pytest.mark.parametrize("guarded", [False, True])
def test_filter(arm, args, caplog, wrong, guarded):
    arm(**(ALONE if guarded else OFF))
    running = batch(args, [request("a", 7, done=True), request("b", 8), request("c", 9)])
    running.spec_info = WRONG[wrong]()
    if not guarded:
        with pytest.raises((AttributeError, ValueError), match=r"filter_batch|should not happen"):
            running.filter_batch(v1_spec_info_filtered=True)
        return
    with caplog.at_level(logging.WARNING, "g4debug"):
        for _ in range(2):
            running.filter_batch(v1_spec_info_filtered=True)
    assert [r.rid for r in running.reqs] == ["b", "c"]
    assert running.spec_info.bonus_tokens.tolist() == [8, 9]
    assert all(plain(running.spec_info, i) for i in range(2))
    assert len(caplog.records) == 1


def test_filter_by_index_when_the_rows_are_of_the_unfinished_only(arm, args):
    """Preemption filters by index before anything dropped the finished ones."""
    arm(**ALONE)
    running = batch(args, [request("a", 7, done=True), request("b", 8), request("c", 9)])
    running.spec_info = draft_input(running.reqs[1:])
    running.filter_batch(keep_indices=[1])
    assert running.spec_info.bonus_tokens.tolist() == [8]


def test_filter_by_index_without_the_guard(arm, args):
    """The row of another request: b goes on from c's token."""
    arm(**OFF)
    running = batch(args, [request("a", 7, done=True), request("b", 8), request("c", 9)])
    running.spec_info = draft_input(running.reqs[1:])
    running.filter_batch(keep_indices=[1])
    assert running.spec_info.bonus_tokens.tolist() == [9]


def test_what_fits_goes_sglangs_own_way(arm, args, caplog):
    arm(**ALONE)
    a, b = batch(args, [request("a", 7)]), batch(args, [request("b", 8), request("c", 9)])
    mine = a.spec_info
    with caplog.at_level(logging.WARNING):
        a.merge_batch(b)
        a.filter_batch(keep_indices=[0, 2])
    assert a.spec_info is mine
    assert mine.bonus_tokens.tolist() == [7, 9]
    assert all(own(mine, i) for i in range(2))
    not_run = batch(args, [request("a", 7, done=True), request("b", 8)], rows=None)
    not_run.filter_batch()
    assert not_run.spec_info is None
    assert not caplog.records


def test_nobody_left_leaves_the_batch_as_sglang_does(arm, args, caplog):
    arm(**ALONE)
    left = spec_batch.verify_input()
    drained = batch(args, [request("a", 7, done=True)], rows=left)
    drained.filter_batch(v1_spec_info_filtered=True)
    assert drained.reqs == []
    assert drained.spec_info is left
    assert not caplog.records


@pytest.mark.parametrize("name", ["EAGLE", None])
def test_other_algorithms_are_left_alone(arm, args, name):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    arm(**ALONE)
    running = batch(args, [request("a", 7, done=True), request("b", 8)])
    running.spec_algorithm = SpeculativeAlgorithm.from_string(name)
    running.spec_info = spec_batch.verify_input()
    with pytest.raises(AttributeError, match="filter_batch"):
        running.filter_batch(v1_spec_info_filtered=True)


def test_an_error_in_sglang_leaves_the_draft_state(arm, args, monkeypatch):
    arm(**ALONE)
    left = spec_batch.verify_input()
    running = batch(args, [request("a", 7, done=True), request("b", 8)], rows=left)
    with pytest.raises(AttributeError):
        running.merge_batch(None)
    monkeypatch.setattr(running, "sampling_info", None)
    with pytest.raises(AttributeError):
        running.filter_batch(v1_spec_info_filtered=True)
    assert running.spec_info is left


def test_the_probe(sglang):
    assert spec_batch_guards.still_broken() is True
