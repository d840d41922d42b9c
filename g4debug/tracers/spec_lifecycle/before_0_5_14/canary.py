"""A step of the v1 worker, on stand-ins for SGLang's objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.faults import verify_input_left
from g4debug.faults.base import Injection
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.canary import found, must_have_fired, once, sound
from g4debug.tracers.spec_lifecycle.before_0_5_14.tracer import SpecLifecycleV1
from g4debug.tracers.spec_lifecycle.canary import ACCEPTED, FAULT, LENGTHS, read_back

STEPS, HIDDEN = 3, 8


class _Spec(SimpleNamespace):
    """The tracer knows the subclasses by their names, which are SGLang's."""


class FrozenKVMTPDraftInput(_Spec):
    pass


class FrozenKVMTPVerifyInput(_Spec):
    pass


class FrozenKVMTPDraftExtendInput(_Spec):
    pass


def fire(folder: Path, device: torch.device) -> str:
    settings = Settings(debug=True, debug_dir=folder)
    tracer = SpecLifecycleV1(Context.alone("spec-lifecycle", settings))
    batch = _batch(device)
    with sound("a sound step"):
        for _ in range(2):
            _step(tracer, batch, device, None)
    fault = once(FAULT)

    def wrong_step() -> None:
        _step(tracer, batch, device, fault)
        must_have_fired(fault)

    return read_back(found(wrong_step, f"the fault {FAULT.id}"), "end")


def _batch(device: torch.device) -> Any:
    """A ScheduleBatch after its prefill, with the fields that the tracer reads."""
    reqs = [
        SimpleNamespace(
            rid=f"canary-{i}",
            output_ids=[7],
            kv_committed_len=n,
            spec_verify_ct=0,
            is_retracted=False,
            finished=lambda: False,
        )
        for i, n in enumerate(LENGTHS)
    ]
    no = lambda: False  # noqa: E731
    return SimpleNamespace(
        reqs=reqs,
        forward_mode=SimpleNamespace(name="DECODE", is_idle=no, is_extend=no),
        is_extend_in_batch=False,
        enable_overlap=False,
        seq_lens=torch.tensor(LENGTHS, device=device),
        seq_lens_cpu=torch.tensor(LENGTHS),
        spec_info=_draft_input(device),
    )


def _draft_input(device: torch.device) -> Any:
    n = len(LENGTHS)
    return FrozenKVMTPDraftInput(
        bonus_tokens=torch.zeros(n, dtype=torch.int64, device=device),
        topk_p=torch.zeros(n, 1, device=device),
        topk_index=torch.zeros(n, 1, dtype=torch.int64, device=device),
        hidden_states=torch.zeros(n, HIDDEN, device=device),
    )


def _step(
    tracer: SpecLifecycleV1, batch: Any, device: torch.device, injection: Injection | None
) -> None:
    """One decode step: the hand-overs, and the changes by SGLang's worker in between."""
    worker = SimpleNamespace(topk=1, speculative_num_steps=STEPS)
    n, tokens = len(LENGTHS), sum(ACCEPTED)
    tracer.before_draft(worker, batch)
    verify_input = FrozenKVMTPVerifyInput(
        draft_token=torch.zeros(n * (STEPS + 1), device=device),
        positions=torch.zeros(n * (STEPS + 1), device=device),
        retrieve_index=torch.zeros(n, STEPS + 1, device=device),
        draft_token_num=STEPS + 1,
    )
    tracer.after_draft(verify_input, worker, batch)
    batch.spec_info = verify_input
    tracer.before_verify(worker, batch)
    for request, accepted in zip(batch.reqs, ACCEPTED, strict=True):
        request.output_ids = request.output_ids + [7] * accepted
        request.kv_committed_len += accepted
        request.spec_verify_ct += 1
    batch.seq_lens += torch.tensor(ACCEPTED, device=device)
    batch.seq_lens_cpu += torch.tensor(ACCEPTED)
    extend = FrozenKVMTPDraftExtendInput(
        num_accept_tokens_cpu=list(ACCEPTED),
        num_accept_tokens=torch.tensor(ACCEPTED, device=device),
        input_ids=torch.zeros(tokens, device=device),
        hidden_states=torch.zeros(tokens, HIDDEN, device=device),
        seq_lens=batch.seq_lens,
        seq_lens_cpu=batch.seq_lens_cpu,
        req_pool_indices=torch.arange(n, device=device),
    )
    output = SimpleNamespace(
        draft_extend_input=extend, num_correct_drafts_per_req_cpu=[a - 1 for a in ACCEPTED]
    )
    tracer.after_verify(output, worker, batch)
    batch.spec_info = extend
    tracer.before_extend_after_decode(worker, batch)
    batch.spec_info = _draft_input(device)
    tracer.after_seed(None, worker, batch)
    if injection is not None:
        verify_input_left.leave(batch, verify_input, injection)
    tracer.after_forward(None, worker, batch)
