"""Proves that the spec-lifecycle tracer works: it must catch a fault in an invented step.

The tracer, the fault, the trap and the dump are the real ones. On a release with speculative
decoding v2 the requests, the batch, the FutureMap and the ``spec_info`` objects are SGLang's, too.
Otherwise, and where SGLang cannot be imported, they are stand-ins, and it is a step of the v1
worker. No server is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.dumps import reading
from g4debug.faults import verify_input_left
from g4debug.faults.base import Injection
from g4debug.faults.grammar import Chain, parse
from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks
from g4debug.hooking.speculation import is_v2
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.spec_lifecycle.rehearsal import Classes, Rehearsal
from g4debug.tracers.spec_lifecycle.tracer import SpecLifecycleTracer
from g4debug.tracers.spec_lifecycle.v2 import SpecLifecycleV2
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap, TrapError

FAULT = verify_input_left.FAULT.id
LENGTHS = (130, 1, 512)
ACCEPTED = (1, 4, 2)  # accepted tokens of each request, including the bonus token
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
    """Fire the fault, expect the finding and a dump in ``folder``. Returns what was seen."""
    why = ""
    if is_v2():
        try:
            return _fire_v2(folder, Classes(), device)
        except ImportError as e:
            why = f"; a step of the v1 worker, because SGLang's v2 cannot be imported here: {e}"
    return _fire_v1(folder, device) + why


def _injection() -> Injection:
    fault = verify_input_left.FAULT
    return Injection(fault, Chain(parse(f"{FAULT}=1*on").chains[FAULT], 0, FAULT), 0)


def _fire_v2(folder: Path, classes: Classes, device: torch.device) -> str:
    settings = Settings(debug=True, debug_dir=folder)
    recorder = Recorder(settings.steps)
    trap = Trap(settings, Describer(recorder))
    tracer = SpecLifecycleV2(Context("spec-lifecycle", Hooks(), settings, recorder, trap))
    hooked = {name: (before, after) for name, before, after in tracer.hooks()}
    left: list[Injection] = []
    made: list[Any] = [None]

    def site(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        before, after = hooked.get(name, (None, None))

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = function(*args, **kwargs)
            if name == "worker.draft":
                made[0] = result
            if name == "scheduler.run_batch" and left:
                verify_input_left.leave(args[1], made[0], left[0])
            return result if after is None else after(result, *args, **kwargs)

        return call

    rehearsal = Rehearsal(site, classes, device)
    batch = rehearsal.batch(
        *(rehearsal.request(f"canary-{i}", i + 1, n) for i, n in enumerate(LENGTHS))
    )
    try:
        recorder.count()
        rehearsal.prefill(batch)
        for _ in range(2):
            recorder.count()
            rehearsal.process(*rehearsal.launch(batch, ACCEPTED))
    except TrapError as e:
        raise CanaryError(f"a sound step was reported as broken: {e.finding.headline}") from e
    left.append(_injection())
    recorder.count()
    try:
        rehearsal.launch(batch, ACCEPTED)
    except TrapError as e:
        return _read_back(e, "run-batch") + ", of a step of speculative decoding v2"
    if not left[0].schedule:
        raise CanaryError(f"the fault {FAULT} did not fire")
    raise CanaryError(f"the fault {FAULT} was not found")


def _fire_v1(folder: Path, device: torch.device) -> str:
    settings = Settings(debug=True, debug_dir=folder)
    recorder = Recorder(settings.steps)
    trap = Trap(settings, Describer(recorder))
    tracer = SpecLifecycleTracer(Context("spec-lifecycle", Hooks(), settings, recorder, trap))
    batch = _batch(device)
    for _ in range(2):
        error = _step(tracer, batch, device, None)
        if error is not None:
            raise CanaryError(f"a sound step was reported as broken: {error.finding.headline}")
    injection = _injection()
    error = _step(tracer, batch, device, injection)
    if not injection.schedule:
        raise CanaryError(f"the fault {FAULT} did not fire")
    if error is None:
        raise CanaryError(f"the fault {FAULT} was not found")
    return _read_back(error, "end")


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
    tracer: SpecLifecycleTracer, batch: Any, device: torch.device, injection: Injection | None
) -> TrapError | None:
    """One decode step: the hand-overs, and what SGLang's worker does to the batch in between."""
    worker = SimpleNamespace(topk=1, speculative_num_steps=STEPS)
    n, tokens = len(LENGTHS), sum(ACCEPTED)
    try:
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
    except TrapError as e:
        return e
    return None


def _read_back(error: TrapError, where: str) -> str:
    """Compare the finding and its dump with what was done. where: the last hand-over's name."""
    if error.path is None:
        raise CanaryError(f"it was found, but not dumped: {error.problem}")
    record = reading.read(error.path)
    if record.finding.kind != "verify-input-left":
        raise CanaryError(f"something else was found: {record.finding.headline}")
    last = record.transitions[-1] if record.transitions else None
    if last is None or last.ok or (last.site, last.after) != (where, "verify-input"):
        raise CanaryError(
            "it was found, but the dump's history does not end with the wrong hand-over"
        )
    return f"found the verify input that was left; {len(record.transitions)} hand-overs read back"
