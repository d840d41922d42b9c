"""idle-draft-input on SGLang's real worker, batches and draft inputs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import spec_batch
import torch
from sglang_of import sglang_of

from g4debug.fixes.before_0_5_14.idle_draft_input import still_broken
from g4debug.hooking import targets

pytestmark = pytest.mark.written_for("idle-draft-input")

OFF = {"G4DEBUG_FIX_IDLE_DRAFT_INPUT": "0", "G4DEBUG_FIX_SPEC_BATCH_GUARDS": "0"}
ALONE = {"G4DEBUG_FIX_SPEC_BATCH_GUARDS": "0"}


@pytest.fixture
def args(sglang, monkeypatch):
    made = spec_batch.server_args()
    monkeypatch.setattr("sglang.srt.server_args._global_server_args", made)
    return made


def worker(args, dp_attention=False, survivors=False):
    """SGLang's worker; only the two forwards of models are stand-ins.

    Its verify ends as SGLang's does: with a draft-extend input of the requests that go on.
    """
    from sglang.srt.speculative.eagle_info import EagleVerifyOutput
    from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker

    class Worker(FrozenKVMTPWorker):
        _recurrent_hidden_size = 64
        draft_model_runner = SimpleNamespace(tp_group=None)

        def draft(self, batch):
            return spec_batch.verify_input()

        def verify(self, batch):
            output = EagleVerifyOutput.create_idle(
                draft_extend_input=spec_batch.extend_input(),
                logits_output=None,
                device="cpu",
                spec_steps=3,
            )
            if survivors:
                output.draft_extend_input.input_ids = torch.zeros(1, dtype=torch.long)
            return (None, output, False) if targets.matches("<0.5.13") else output

    made = Worker.__new__(Worker)
    made.device, made.topk = "cpu", spec_batch.TOPK
    made.server_args = SimpleNamespace(enable_dp_attention=dp_attention)
    made.model_config = args.get_model_config()
    made.draft_tp_context = lambda group: nullcontext()
    return made


@pytest.mark.parametrize("environ", [OFF, {}, ALONE])
def test_every_request_finished(arm, args, environ):
    """Off: the verify input stays, and the merge is the AttributeError of the real crash.

    0.5.13 puts an idle input there itself.
    """
    arm(**environ)
    drained = spec_batch.batch(args, [spec_batch.request("a", 7, done=True)])
    worker(args).forward_batch_generation(drained)
    waiting = spec_batch.batch(args, [spec_batch.request("b", 8), spec_batch.request("c", 9)])
    if environ is OFF and targets.matches("<0.5.13"):
        with pytest.raises(AttributeError, match=r"'FrozenKVMTPVerifyInput' .* 'merge_batch'"):
            drained.merge_batch(waiting)
        return
    assert type(drained.spec_info).__name__ == "FrozenKVMTPDraftInput"
    assert drained.spec_info.hidden_states.shape == (0, 64)
    assert drained.spec_info.hidden_states.dtype == args.get_model_config().dtype
    assert drained.spec_info.topk_p.shape == (0, spec_batch.TOPK)
    drained.merge_batch(waiting)
    drained.filter_batch(v1_spec_info_filtered=True)
    assert [r.rid for r in drained.reqs] == ["b", "c"]
    assert drained.spec_info.bonus_tokens.tolist() == [8, 9]


@pytest.mark.parametrize("fixed", [False, True])
def test_dp_attention_stores_it_on_a_copy(arm, args, monkeypatch, fixed):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    monkeypatch.setattr(ScheduleBatch, "prepare_for_idle", lambda batch: None)  # wants pools
    arm(**({} if fixed else OFF))
    drained = spec_batch.batch(args, [spec_batch.request("a", 7, done=True)])
    worker(args, dp_attention=True).forward_batch_generation(drained)
    left = "FrozenKVMTPDraftInput" if fixed else "FrozenKVMTPDraftExtendInput"
    assert type(drained.spec_info).__name__ == left
    waiting = spec_batch.batch(args, [spec_batch.request("b", 8)])
    with nullcontext() if fixed else pytest.raises(AttributeError, match="merge_batch"):
        drained.merge_batch(waiting)


def test_a_batch_that_goes_on_keeps_what_the_worker_seeded(arm, args, monkeypatch):
    arm()
    seeded = spec_batch.draft_input([spec_batch.request("b", 8)])
    made = worker(args, survivors=True)
    monkeypatch.setattr(
        made, "forward_draft_extend_after_decode", lambda batch: setattr(batch, "spec_info", seeded)
    )
    reqs = [spec_batch.request("a", 7, done=True), spec_batch.request("b", 8)]
    running = spec_batch.batch(args, reqs)
    made.forward_batch_generation(running)
    assert running.spec_info is seeded


def test_a_live_request_without_draft_state_is_not_hidden(arm, args, monkeypatch):
    """An idle input would be wrong there; that is what the guards are for."""
    arm()
    made = worker(args, survivors=True)
    monkeypatch.setattr(made, "forward_draft_extend_after_decode", lambda batch: None)
    running = spec_batch.batch(args, [spec_batch.request("b", 8)])
    made.forward_batch_generation(running)
    assert type(running.spec_info).__name__ == "FrozenKVMTPDraftExtendInput"


def test_the_probe(sglang):
    """0.5.13 has the other side of the branch, and under DP attention still only a copy has it."""
    assert still_broken() is targets.matches("<0.5.14")


WORKER = """
class FrozenKVMTPWorker:
    def forward_batch_generation(self, batch):
        if enable_dp_attention or draft_extend_input.input_ids.shape[0] > 0:
            self.forward_draft_extend_after_decode(batch)
        {other_side}

    def forward_draft_extend_after_decode(self, batch):
        {batch}
        batch.spec_info = FrozenKVMTPDraftInput.create_idle_input()
"""


@pytest.mark.parametrize(
    ("other_side", "batch", "broken"),
    [
        ("", "batch = batch.copy()", True),
        ("else: self._draft_preprocess_idle(batch)", "batch = batch.copy()", True),
        ("", "pass", True),
        ("else: self._draft_preprocess_idle(batch)", "pass", False),
    ],
)
def test_the_probe_sees_both_halves(tmp_path, other_side, batch, broken):
    worker = WORKER.format(other_side=other_side, batch=batch)
    with sglang_of(tmp_path, {"sglang/srt/speculative/frozen_kv_mtp_worker.py": worker}):
        assert still_broken() is broken
