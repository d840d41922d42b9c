"""spec-lifecycle for FROZEN_KV_MTP's v1 worker.

It follows the worker through draft, verify, extend-after-decode, seed step and the end of
``forward_batch_generation``, and the scheduler through ``merge_batch`` and ``filter_batch``. It
looks at types, shapes, object identity, and the counters that SGLang has on the host anyway. It
never waits for the device.

A verify input that stays when *every* request has finished is no finding yet: if nothing joins the
batch, it is dropped with it. It is a finding when the batch is merged with a live one (seed PR
#22), one line before SGLang's AttributeError.
"""

from __future__ import annotations

import weakref
from typing import Any

from g4debug import speculation
from g4debug.fixes.base import state_of as state_of_fix
from g4debug.hooking.resolved import dp_attention
from g4debug.speculation.before_0_5_14.frozen_kv_mtp import V2_PATH
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle import draft_embedding, draft_kv_pool
from g4debug.tracers.spec_lifecycle.batches import SpecBatches
from g4debug.tracers.spec_lifecycle.before_0_5_14 import overlapped
from g4debug.tracers.spec_lifecycle.before_0_5_14.counters import Counting, DeviceLengths
from g4debug.tracers.spec_lifecycle.before_0_5_14.log import V1Log
from g4debug.tracers.spec_lifecycle.check import (
    DRAFT,
    EXTEND,
    VERIFY,
    Violation,
    check_accepted,
    check_counts,
    check_rows,
    check_state,
)
from g4debug.tracers.spec_lifecycle.hidden_states import Custody
from g4debug.tracers.spec_lifecycle.log import Accepted
from g4debug.tracers.spec_lifecycle.spec_info import (
    check_draft_input,
    check_fields,
    check_verify_input,
    state_of,
)
from g4debug.tracers.spec_lifecycle.tracer import no_draft


class V1Batches(SpecBatches):
    """v1's draft input has one row for each request that goes on."""

    def allowed(self, batch: Any) -> tuple[str, ...]:
        return (DRAFT,)

    def rows(self, batch: Any) -> int:
        return sum(not r.finished() for r in batch.reqs)

    def check_rows(self, spec: Any, requests: int) -> Violation | None:
        return check_draft_input(self.custody, spec, requests)


class SpecLifecycleV1:
    """The hooks for the v1 worker."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._seeded_from = ""  # the state before the current seed step
        self.log = V1Log(context)
        self.counting = Counting()
        self.custody = Custody()
        self.batches = V1Batches(self.log, self.custody)
        self.lengths = DeviceLengths()
        self.binding = draft_embedding.Binding(context, self.log)
        self.shown_pool = draft_kv_pool.ShownPool(context, self.log)
        self._drafted: weakref.ref[Any] | None = (
            None  # the verify input that this step's draft made
        )
        self._extend: weakref.ref[Any] | None = None  # the draft-extend input that its verify made

    def install(self) -> None:
        for site, before, after in (
            ("worker.target_extend", None, self.after_target_extend),
            ("worker.target_forward", None, self.after_target_forward),
            ("worker.select_extended", self.before_select_extended, self.after_select_extended),
            ("worker.draft", self.before_draft, self.after_draft),
            ("worker.verify", self.before_verify, self.after_verify),
            ("worker.extend_after_decode", self.before_extend_after_decode, None),
            ("worker.select_verified", self.before_select_verified, self.after_select_verified),
            ("worker.seed_step", self.before_seed, self.after_seed),
            ("batch.merge", self.batches.before_merge, self.batches.after_merge),
            ("batch.filter", self.batches.before_filter, self.batches.after_filter),
            ("worker.forward", None, self.after_forward),
            ("scheduler.stream_output", self.before_stream_output, None),
            ("scheduler.init", None, self.after_scheduler_init),
        ):
            if before is not None:
                self.context.before(site, before)
            if after is not None:
                self.context.after(site, after)
        self.binding.install()
        self.shown_pool.install()

    def after_scheduler_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if speculation.of(scheduler) is None:
            if speculation.is_plain(scheduler):
                self.context.nothing("this server runs no draft", off=True)
            else:
                self.context.off(f"{no_draft(scheduler)}, so there is nothing to check")
        elif dp_attention(scheduler.server_args):
            self.context.off(
                "with DP attention a rank idles in a draft, and this tracer was never run so"
            )
        else:
            self.context.limit(*NOT_BY_VALUE)
        return result

    # The hand-overs, in the order of a step.

    def after_target_extend(self, result: Any, worker: Any, batch: Any) -> Any:
        if not _idle(batch):
            self.log.judge(
                "worker.target_extend", batch, self.custody.made_by_forward(result[0].hidden_states)
            )
        return result

    def before_select_extended(self, worker: Any, batch: Any, hidden_states: Any) -> None:
        if not _idle(batch):
            self.log.judge("worker.select_extended", batch, self.custody.check_made(hidden_states))

    def after_select_extended(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self.custody.select(result)
        return result

    def before_draft(self, worker: Any, batch: Any) -> None:
        if _idle(batch):
            return
        spec, requests = batch.spec_info, len(batch.reqs)
        lens = batch.seq_lens_cpu.tolist()
        self.log.judge(
            "worker.draft",
            batch,
            check_state(state_of(spec), type(spec).__name__, (DRAFT,))
            or check_draft_input(self.custody, spec, requests)
            or check_counts(
                "seq-len", "seq_lens_cpu", [r.kv_committed_len for r in batch.reqs], lens
            )
            or self.lengths.begin(batch.seq_lens, lens),
        )

    def after_draft(self, result: Any, worker: Any, batch: Any) -> Any:
        if not _idle(batch):
            self._drafted = weakref.ref(result)
            self.log.note("draft", state_of(batch.spec_info), state_of(result), len(batch.reqs))
        return result

    def after_target_forward(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self.lengths.start()
        return result

    def before_verify(self, worker: Any, batch: Any) -> None:
        self.counting.cancel()
        if _idle(batch):
            return
        violation = check_verify_input(batch.spec_info, len(batch.reqs), self._drafted)
        self.log.judge("worker.verify", batch, violation)
        self.counting.begin(batch)

    def after_verify(self, result: Any, worker: Any, batch: Any) -> Any:
        if not self.counting.begun:
            return result
        # From 0.5.13 on, the logits are part of the verify output.
        output = result if hasattr(result, "draft_extend_input") else result[1]
        correct = list(output.num_correct_drafts_per_req_cpu)
        extend = output.draft_extend_input
        self._extend = weakref.ref(extend)
        live = [i for i, r in enumerate(batch.reqs) if not r.finished()]
        note = Accepted([n + 1 for n in correct], len(batch.reqs) - len(live))
        self.log.judge(
            "worker.verify",
            batch,
            check_accepted(correct, len(batch.reqs), worker.speculative_num_steps)
            or self.counting.check_verify(worker, batch, correct, live)
            or _check_extend_input(extend, [correct[i] + 1 for i in live])
            or self.custody.made_by_forward(extend.hidden_states)
            or self.lengths.look(),
            note=note,
        )
        self.log.note("verify", VERIFY, state_of(batch.spec_info), len(batch.reqs), note)
        return result

    def before_extend_after_decode(self, worker: Any, batch: Any) -> None:
        if _idle(batch):
            return
        spec = batch.spec_info
        violation = check_state(state_of(spec), type(spec).__name__, (EXTEND,))
        if violation is None and self._extend is not None and self._extend() is not spec:
            violation = Violation(
                "wrong-type", "the draft-extend-input of this step's verify", "another object"
            )
        self.log.judge("worker.extend_after_decode", batch, violation)
        self.log.note("extend-after-decode", VERIFY, state_of(spec), len(batch.reqs))

    def before_select_verified(self, worker: Any, draft_input: Any) -> None:
        self.log.judge(
            "worker.select_verified", None, self.custody.check_made(draft_input.hidden_states)
        )

    def after_select_verified(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self.custody.select(result[1])
        return result

    def before_seed(
        self,
        worker: Any,
        batch: Any,
        last_token_ids: Any,
        last_hidden_states: Any,
        *a: Any,
        **k: Any,
    ) -> None:
        if _idle(batch):
            return
        rows = {
            "last_token_ids": len(last_token_ids),
            "last_hidden_states": len(last_hidden_states),
        }
        self.log.judge(
            "worker.seed_step",
            batch,
            check_rows(rows, dict.fromkeys(rows, int(batch.seq_lens.shape[0])))
            or self.custody.check_selected(last_hidden_states),
        )
        self._seeded_from = state_of(batch.spec_info)

    def after_seed(self, result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not _idle(batch):
            spec = batch.spec_info
            self.custody.hold(spec)
            rows = int(batch.seq_lens.shape[0])
            self.log.note("seed", self._seeded_from, state_of(spec), rows)
        return result

    def after_forward(self, result: Any, worker: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        if _idle(batch):
            return result
        spec = batch.spec_info
        state, requests = state_of(spec), len(batch.reqs)
        extend = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        live = requests if extend else sum(not r.finished() for r in batch.reqs)
        if state in (VERIFY, EXTEND):
            self.log.leave(spec, requests, live)
        violation = None
        if live:
            violation = check_state(state, type(spec).__name__, (DRAFT,)) or check_draft_input(
                self.custody, spec, live
            )
        note = "extend" if extend else "" if live else "every request finished"
        self.log.judge(
            "worker.forward", batch, violation or self.counting.check_since(batch.reqs), note=note
        )
        self.log.note("end", state, state, requests, note)
        return result

    def before_stream_output(self, streamer: Any, reqs: Any, *args: Any, **kwargs: Any) -> None:
        """Check before the tokens leave: nobody may get tokens that were counted twice."""
        violation = self.counting.check_since(reqs)
        self.counting.sent()
        if violation is not None:
            self.log.judge("scheduler.stream_output", None, violation, [r.rid for r in reqs])


def _idle(batch: Any) -> bool:
    return bool(batch.forward_mode.is_idle())


def _check_extend_input(spec: Any, accepted: list[int]) -> Violation | None:
    """The draft-extend input must have the requests that go on, and all their tokens."""
    if not accepted:
        return None
    violation = check_state(state_of(spec), type(spec).__name__, (EXTEND,))
    if violation is not None:
        return violation
    counts = check_counts(
        "accept-length", "num_accept_tokens", accepted, list(spec.num_accept_tokens_cpu)
    )
    rows = ("num_accept_tokens", "seq_lens", "seq_lens_cpu", "req_pool_indices")
    return (
        counts
        or check_fields(spec, ("input_ids", "hidden_states"), sum(accepted))
        or check_fields(spec, rows, len(accepted))
    )


# The limits of this tracer: docs/tracers.md says what today's tracer compares.
NOT_BY_VALUE = (
    "what a step hands on is checked by shapes, counts and lengths, not by its values",
    "its values are followed from SGLang 0.5.15 on",
)


def install(context: Context) -> None:
    """Follow the v1 worker, and 0.5.12's v2 where the path that brings it is in force."""
    if state_of_fix(V2_PATH) == "applied":
        overlapped.install(context, SpecLifecycleV1, NOT_BY_VALUE)
    else:
        SpecLifecycleV1(context).install()
