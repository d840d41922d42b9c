"""spec-lifecycle: checks that ``batch.spec_info`` fits each hand-over, and that tokens count once.

A step of speculative decoding v2 reads the lengths, bonus tokens and hidden states of the step
before from the FutureMap, drafts, verifies, publishes the new lengths, and stashes bonus tokens and
hidden states. Its result is processed later: with overlap scheduling after the next step has begun.
Values that the host knows at a hand-over are checked there. Values that only the device knows are
copied without waiting, and are checked when the result is processed, before a token of that step
leaves.

The adapters in :mod:`g4debug.speculation` name the workers, and the functions to hook in them.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from g4debug import speculation
from g4debug.hooking import req_kv, targets
from g4debug.hooking.older import older_module
from g4debug.hooking.resolved import dp_attention, server_argument
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.spec_lifecycle import draft_embedding, draft_kv_pool, sampled_tokens
from g4debug.tracers.spec_lifecycle import handed_on as h
from g4debug.tracers.spec_lifecycle.answers import Answers
from g4debug.tracers.spec_lifecycle.batches import SpecBatches
from g4debug.tracers.spec_lifecycle.check import (
    DRAFT,
    IDLE,
    VERIFY,
    Violation,
    at_rows,
    check_allocated,
    check_places,
    check_publish,
    check_published,
    check_same_rows,
    check_state,
)
from g4debug.tracers.spec_lifecycle.check_values import Rows, check_from_last
from g4debug.tracers.spec_lifecycle.copies import Copies, Pool
from g4debug.tracers.spec_lifecycle.forward_inputs import ForwardInputs
from g4debug.tracers.spec_lifecycle.future_rows import LENGTHS, SEED, FutureRows, live_rows
from g4debug.tracers.spec_lifecycle.hidden_states import Custody, Mark, digest
from g4debug.tracers.spec_lifecycle.log import Accepted, SpecLog
from g4debug.tracers.spec_lifecycle.pending_steps import Books, PendingStep, PendingSteps, committed
from g4debug.tracers.spec_lifecycle.spec_info import (
    check_fields,
    check_verify_input,
    fields_of,
    hidden_of,
    state_of,
)
from g4debug.tracers.spec_lifecycle.token_commit import Committing

# Values that were read on GPUs, too, in all releases in which this tracer was run there.
RUN_ON_GPU = (h.INDICES, h.LENS, h.BONUS, h.NEW_LENS)
NOT_FOLLOWED = (
    "on a GPU the rest costs the host some 1.5 ms of each decode step; G4DEBUG_MODE=log follows "
    "it, and so does G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1, with which it was run, on requests with "
    "temperatures and grammars"
    if targets.ran_all_values()
    else "on a GPU the rest was never run on this release with a temperature and a grammar, so a "
    "finding could be false; G4DEBUG_MODE=log reports only, and "
    "G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1 takes that risk"
)
# Without these less is judged.
OPTIONAL = ("result.resolve", "verify.sample", "verify.kernel", "draft.tree")
Hook = Callable[..., Any]
Hooked = tuple[str, Hook | None, Hook | None]
VERIFIES = "verifies"  # one in each step of a draft
ANOTHER_OBJECT = Violation("wrong-type", "the draft-input that this step made", "another object")


class SpecLifecycle:
    """Follows the steps of a worker, and the scheduler through merge_batch and filter_batch."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.log = SpecLog(context)
        self.custody = Custody()
        self.batches = SpecBatches(self.log, self.custody)
        self.rows = FutureRows()
        self.pending = PendingSteps()
        self.binding = draft_embedding.Binding(context, self.log)
        self.shown_pool = draft_kv_pool.ShownPool(context, self.log)
        self.sampled = sampled_tokens.SampledTokens(context, self.log)
        self.inputs = ForwardInputs(context, self.log)
        self.answers = Answers(context, self.log, lambda: self.sampled.judging)
        self.committing = Committing()
        self.pool = Pool()
        # False on a server that was not run with this tracer, and in a release that counts in
        # another way (0.5.14).
        self.judging = targets.counts_with_result()
        self._now: PendingStep | None = None  # the step that the worker runs
        self._relayed: Mark | None = None  # FutureMap's hidden states, as the last stash left them
        self._ahead: tuple[int, int] | None = None  # depth and width of a verify
        self._made: weakref.ref[Any] | None = None  # the next draft input of this forward
        self._processing: PendingStep | None = None  # its result is being processed
        self._accepted: list[int] = []
        self._simulated = simulates()
        self._local = True  # each rank puts out what it has sampled itself
        self._by_value = follows_values(context.settings)
        self.inputs.judging &= self._by_value

    def hooks(self) -> tuple[Hooked, ...]:
        """(site, before, after) of each site; None for a side that is not hooked."""
        worker: tuple[Hooked, ...] = (
            ("forward", self.before_forward, self.after_forward),
            ("draft", self.before_draft, self.after_draft),
            ("draft_forward", self.before_draft_forward, None),
            ("verify", self.before_verify, self.after_verify),
            ("draft_extend", None, self.after_draft_extend),
        )
        return (
            *(
                (site, before, after)
                for what, before, after in worker
                for site in speculation.sites(what)
            ),
            ("draft.tree", None, self.after_tree),
            ("worker.target_forward", self.before_target_forward, self.after_target_forward),
            ("verify.sample", None, self.after_sample),
            ("verify.kernel", None, self.after_kernel),
            ("future.resolve_lens", self.before_resolve_lens, self.after_resolve_lens),
            ("future.gather", self.before_gather, self.after_gather),
            ("future.publish", self.before_publish, None),
            ("future.stash", self.before_stash, self.after_stash),
            ("scheduler.run_batch", None, self.after_run_batch),
            ("result.resolve", self.before_resolve, self.after_resolve),
            ("scheduler.stream_output", self.before_stream_output, None),
            ("batch.prepare_for_decode", None, self.after_prepare_for_decode),
            ("batch.merge", self.batches.before_merge, self.batches.after_merge),
            ("batch.filter", self.batches.before_filter, self.batches.after_filter),
            ("scheduler.init", None, self.after_scheduler_init),
        )

    def rests(self, mode: str) -> str:
        """Why a step may have nothing to check."""
        if self.sampled.skips:
            return "beams, and batches that prefill and decode at once, are not followed"
        if self.judging or self.sampled.judging or self.inputs.judging:
            return ""
        return "a limit has said that only some hand-overs are checked"

    def install(self) -> None:
        self.context.status.rests = self.rests
        for site, before, after in self.hooks():
            optional = site in OPTIONAL
            if before is not None:
                self.context.before(site, before, optional)
            if after is not None:
                self.context.after(site, after, optional)
        self.sampled.install()
        self.inputs.install()
        self.answers.install()
        self.binding.install()
        self.shown_pool.install()

    def after_scheduler_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        reasons = unknown(scheduler.server_args)
        every = [*reasons, *sampled_tokens.unknown(scheduler.server_args)]
        adapter = speculation.of(scheduler)
        if adapter is None:
            self.judging = False
            plain, follows = speculation.is_plain(scheduler), sampled_tokens.follows(scheduler)
            if self._by_value and follows:
                what = "sampled tokens, rows, lengths and positions are checked, no draft"
                if plain:
                    self.context.nothing("no draft, because this server runs none")
                else:
                    self.context.limit(what, no_draft(scheduler))
                self.sampled.limit(every)
                self.inputs.limit(every)
                return result
            self.sampled.judging = self.inputs.judging = False
            if follows:  # there are sampled tokens, which are not judged here
                self.context.off(f"{no_draft(scheduler)}; {NOT_FOLLOWED}", documented=plain)
            elif plain:
                self.context.nothing("this server runs no draft", off=True)
            else:
                self.context.off(f"{no_draft(scheduler)}, so there is nothing to check")
            return result
        settings = self.context.settings
        on_cpu = settings.cpu or not torch.cuda.is_available()
        if not adapter.is_judged(settings, on_cpu):
            self.judging = self.sampled.judging = self.inputs.judging = False
            self.log.mute = True
            self.context.off(not_run(adapter, on_cpu))
            return result
        self.sampled.limit(every)
        self.inputs.limit(every)
        if not self._by_value:
            self.sampled.limit([NOT_FOLLOWED], documented=True)
            self.inputs.limit([NOT_FOLLOWED], documented=True)
            self.context.limit(
                "what a step hands on is checked by its lengths and bonus tokens, not by its other "
                "values",
                NOT_FOLLOWED,
                documented=True,
            )
        self._local = server_argument(scheduler.server_args, "tp_size", 1) == 1
        if self._simulated:
            self.context.limit(
                "what a verify accepts is not compared with what its kernel computed",
                "SGLANG_SIMULATE_ACC_LEN makes it up",
            )
        if not self.judging:
            release = f"SGLang {targets.sglang_version()}"
            reasons.insert(0, f"{release} counts a part of what a verify accepts before it")
        for why in reasons:
            self.judging = False
            self.context.limit(
                "only spec_info at the hand-overs of a worker's step, and in merge_batch and "
                "filter_batch, is checked",
                why,
            )
        return result

    # The values that a step reads from the step before, in the order of a step.

    def before_resolve_lens(self, future_map: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._now = None
        if not decodes(batch):
            return
        spec, requests, worker = batch.spec_info, len(batch.reqs), speculation.of(batch)
        violation = check_state(state_of(spec, worker), type(spec).__name__, (DRAFT,))
        if violation is None:
            violation = check_fields(spec, ("future_indices",), requests)
        if violation is None and self.judging:
            violation = self._check_read(LENGTHS, batch) or self._check_indices(batch)
        self.log.judge("future.resolve_lens", batch, violation)

    def after_resolve_lens(
        self, result: Any, future_map: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Before anything is built from the lengths, as far as the host has them by now."""
        if not decodes(batch) or not self.judging:
            return result
        lens = batch.seq_lens_cpu
        if lens is None and not batch.seq_lens.is_cuda:
            lens = batch.seq_lens
        if lens is not None and self._by_value:
            read = {h.LENS.key: lens.tolist()}
            violation = self._check_last(batch, "seq-len", h.NEW_LENS, h.LENS, read)
            if violation is not None:
                # The lengths may be wrong because others were read. That waits for the device.
                violation = self._check_indices(batch, waits=True) or violation
            self.log.judge("future.resolve_lens", batch, violation)
        return result

    def _check_indices(self, batch: Any, waits: bool = False) -> Violation | None:
        """The FutureMap is read by the rows of the requests. waits: also where that is a wait."""
        indices = batch.spec_info.future_indices
        if indices.is_cuda and not waits:
            return None
        rows, live, found = (
            req_kv.column(batch.reqs, req_kv.ROW),
            live_rows(batch.reqs),
            indices.tolist(),
        )
        others = check_same_rows([rows[i] for i in live], [found[i] for i in live])
        return at_rows(others, live)

    def _check_last(
        self,
        batch: Any,
        kind: str,
        made: h.Reading,
        taken: h.Reading,
        read: dict[str, list[int]],
    ) -> Violation | None:
        """The requests of a batch read the values that their last steps left."""
        last = self.rows.last(req_kv.column(batch.reqs, req_kv.ROW), batch.reqs)
        rows = Rows([str(r.rid) for r in batch.reqs], live_rows(batch.reqs))
        return check_from_last(rows, kind, made, taken, last.left(made.key), read)

    def _named(self, batch: Any, stale: Violation | None, hidden: Any) -> Violation | None:
        """A finding about hidden states, with the row in which they are another request's.

        hidden: those that were found, one row for each request. They are read, which waits for the
        device, because a finding is made.
        """
        if stale is None or hidden is None or hidden.shape[0] != len(batch.reqs):
            return stale
        read = {h.HIDDEN.key: digest(hidden).tolist()}
        return _in_row(stale, self._check_last(batch, stale.kind, h.LEFT_HIDDEN, h.HIDDEN, read))

    def before_gather(self, future_map: Any, batch: Any) -> None:
        if not decodes(batch):
            return
        violation = None
        if self.judging:
            violation = self._check_read(SEED, batch)
            if violation is None and self._relayed is not None:
                violation = Custody.check_relayed(self._relayed, _relayed(future_map))
                if violation is not None:
                    violation = self._in_the_map(future_map, batch, violation)
        self.log.judge("future.gather", batch, violation)

    def _in_the_map(self, future_map: Any, batch: Any, stale: Violation) -> Violation:
        """The hidden states in the FutureMap are not those that were stashed. Are the tokens?

        They are looked at now, which waits for the device, because a finding is made.
        """
        rows = batch.req_pool_indices
        read = {h.BONUS.key: future_map.output_tokens_buf[rows].tolist()}
        token = self._check_last(batch, "bonus-token", h.LEFT_BONUS, h.BONUS, read)
        if token is not None:
            return replace(token, got=f"{token.got}; {stale.what} {stale.got}, too")
        hidden = _relayed(future_map)
        return self._named(batch, stale, None if hidden is None else hidden[rows]) or stale

    def after_gather(self, result: Any, future_map: Any, batch: Any) -> Any:
        if decodes(batch):
            self.custody.hold(batch.spec_info)
            self.log.note("gather", DRAFT, state_of(batch.spec_info), len(batch.reqs))
        return result

    def _check_read(self, what: str, batch: Any) -> Violation | None:
        live, requests = running(batch)
        rows = req_kv.column(requests, req_kv.ROW)
        return at_rows(self.rows.check(what, rows, requests), live)

    # The worker's step.

    def before_forward(
        self, worker: Any, batch: Any, on_publish: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        self._now = None
        adapter = speculation.of(batch)
        if adapter is None or not batch.reqs or self.log.mute:
            return
        decode = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch)
        lens = batch.seq_lens_cpu
        depth, width = adapter.depth(worker), worker.speculative_num_draft_tokens
        self._ahead = (depth, width)
        self._now = step = PendingStep(
            number=self.context.recorder.step,
            decode=decode,
            overlap=on_publish is not None,
            requests=tuple(batch.reqs),
            rows=req_kv.column(batch.reqs, req_kv.ROW),
            indices=batch.req_pool_indices,
            lens=None if lens is None else lens.tolist(),
            allocated=req_kv.column(batch.reqs, req_kv.ALLOCATED),
            depth=depth,
            width=width,
            copies=Copies(self.pool),
            chain=adapter.chains and worker.topk == 1 and depth == width,
            worker=adapter,
            simulated=self._simulated,
            local=self._local,
        )
        if self.judging and self._by_value:
            step.last = self.rows.last(step.rows, batch.reqs)
        if not decode:
            self.committing.forget(batch.reqs)
            if "verify" in adapter.sites:  # others may publish a copy of them
                step.lengths = weakref.ref(batch.seq_lens)
        if self.judging:
            live, requests = running(batch)
            violation = self.rows.run(step.written, req_kv.column(requests, req_kv.ROW), requests)
            self.log.judge("worker.forward", batch, at_rows(violation, live))

    def before_draft(self, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        step = self._now
        if step is None or not decodes(batch):
            return
        spec, requests = batch.spec_info, len(batch.reqs)
        hidden = hidden_of(spec, step.worker)
        violation = check_state(state_of(spec, step.worker), type(spec).__name__, (DRAFT,))
        if violation is None:
            violation = check_fields(spec, fields_of(spec, step.overlap, step.worker), requests)
            violation = violation or self._named(batch, self.custody.check_held(spec), hidden)
        if violation is None and self.judging:
            bonus = step.worker.bonus(spec)
            read = {h.LENS: batch.seq_lens, h.BONUS: bonus, h.HIDDEN: self._digest(hidden)}
            if step.overlap:
                read[h.INDICES] = spec.future_indices
            self._read(step, read)
            violation = self._check_seed(step, bonus)
        self.log.judge("worker.draft", batch, violation)

    def _check_seed(self, step: PendingStep, bonus: Any) -> Violation | None:
        """Report a number that is no token before the draft looks it up, if that waits for nobody.

        A wrong number that is a token is reported when this step's result is processed, because
        more is known about it then.
        """
        given = [] if bonus.is_cuda else bonus.tolist()
        if not any(map(sampled_tokens.no_token, step.requests, given)):
            return None
        left, read = step.left(h.LEFT_BONUS), {h.BONUS.key: given}
        return check_from_last(step.judged, "bonus-token", h.LEFT_BONUS, h.BONUS, left, read)

    def _digest(self, hidden: Any) -> Any:
        return None if hidden is None or not self._by_value else digest(hidden)

    def _read(self, step: PendingStep, tensors: dict[h.Reading, Any]) -> None:
        """Start to bring these to the host, as they are now."""
        known = {r: t for r, t in tensors.items() if self._by_value or r in RUN_ON_GPU}
        step.copies.start_all({r.key: t for r, t in known.items() if t is not None})

    def after_draft(self, result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._now
        if step is not None and step.decode and batch.reqs:
            made = result if result is not None else batch.spec_info
            step.drafted = weakref.ref(made)
            if self.judging:
                tree = (
                    made.retrieve_index,
                    made.retrieve_next_token,
                    made.retrieve_next_sibling,
                )
                drafted = {h.DRAFTED: made.draft_token, h.POSITIONS: made.positions}
                self._read(step, drafted | dict(zip(h.TREE, tree, strict=True)))
            self.log.note("draft", DRAFT, state_of(made), len(batch.reqs))
        return result

    def before_draft_forward(self, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """``batch`` is a ForwardBatch. The replay of a CUDA graph does not come by here.

        It is held against itself and not against the step's requests: SGLang may pad it, and may
        capture a graph of another size.
        """
        step = self._now
        if step is None or not step.decode or worker.topk != 1:
            return
        places = batch.out_cache_loc
        violation = check_places(
            -1 if places is None else len(places),
            batch.batch_size,
            targets.clears_draft_places(),
        )
        self._judge_step("worker.draft_forward", step, violation)

    def before_verify(self, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        step = self._now
        if step is None or not step.decode:
            return
        violation = check_verify_input(batch.spec_info, len(batch.reqs), step.drafted)
        self.log.judge("worker.verify", batch, violation)

    def after_tree(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """The draft's tokens, put in order for the verify."""
        step = self._now
        if step is not None and step.decode and self.judging:
            self._read(step, {h.TREE_TOKENS: result[-1]})
        return result

    def before_target_forward(
        self,
        worker: Any,
        batch: Any,
        forward_batch: Any = None,
        *args: Any,
        is_verify: bool = False,
        **kwargs: Any,
    ) -> None:
        step = self._now
        if step is None or not step.decode or not is_verify or not self.judging:
            return
        if forward_batch is None:  # the worker makes it of the batch, in this call
            ids, positions = batch.input_ids, batch.spec_info.positions
        else:
            ids, positions = forward_batch.input_ids, forward_batch.positions
        self._read(step, {h.FED: ids, h.FED_POSITIONS: positions})
        # A token that is no word ends the process in the target's first layer.
        self._judge_step("worker.target_forward", step, step.check_fed())

    def after_target_forward(
        self, result: Any, worker: Any, *args: Any, is_verify: bool = False, **kwargs: Any
    ) -> Any:
        step = self._now
        if step is not None and step.decode and is_verify and self.judging:
            hidden = result.logits_output.hidden_states
            self._read(step, {h.TARGET_HIDDEN: self._digest(hidden)})
        return result

    def after_kernel(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """The kernel of a greedy verify has decided which tokens are accepted."""
        step = self._now
        if step is not None and step.decode and self.judging:
            tokens, index, correct = result
            step.decided = True
            found = {
                h.CANDIDATES: kwargs.get("candidates"),
                h.WANTED: kwargs.get("target_predict"),
                h.KERNEL_TOKENS: tokens,
                h.KERNEL_INDEX: index,
                h.KERNEL_CORRECT: correct,
            }
            self._read(step, found)
        return result

    def after_sample(self, result: Any, verify_input: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._now
        if step is not None and step.decode and self.judging:
            tokens, lens, index = result
            step.sampled = True
            step.verified |= "verify" not in step.worker.sites
            found = {h.SAMPLE_TOKENS: tokens, h.SAMPLE_LENS: lens, h.SAMPLE_INDEX: index}
            if not step.decided:
                found[h.CANDIDATES] = verify_input.draft_token
            self._read(step, found)
        return result

    def after_verify(self, result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._now
        if step is None or not step.decode:
            return result
        step.verified = True
        step.lengths = weakref.ref(result.new_seq_lens)
        self._judge_verified(batch, step, result)
        self.log.note("verify", VERIFY, state_of(batch.spec_info), len(step.requests))
        return result

    def _judge_verified(self, batch: Any, step: PendingStep, result: Any) -> None:
        """The result of a verify: what the requests get, and what the next step begins with."""
        hidden = result.logits_output.hidden_states
        self.context.checked(1, VERIFIES)
        self.log.judge(
            "worker.verify",
            batch,
            check_fields(result, ("accept_lens", "new_seq_lens"), len(step.requests))
            or self.custody.made_by_forward(hidden),
        )
        if self.judging:
            found = {
                h.NEW_LENS: result.new_seq_lens,
                h.RESULT_TOKENS: result.next_token_ids,
                h.RESULT_LENS: result.accept_lens,
                h.RESULT_BONUS: step.worker.bonus(result.next_draft_input),
                h.RESULT_HIDDEN: self._digest(hidden),
            }
            self._read(step, found)
            self._judge_step("worker.verify", step, step.check_verified())
            if not step.sampled:
                self.context.limit(
                    "of a verify only what follows from its result is checked",
                    "its sampling did not pass by where g4debug looks",
                )

    def before_publish(
        self, future_map: Any, future_indices: Any, new_seq_lens: Any, *args: Any, **kwargs: Any
    ) -> None:
        step = self._now
        if step is None or not future_indices.shape[0]:
            return
        # A worker whose verify is in its forward publishes them before the forward says which.
        own = step.lengths is None or step.lengths() is new_seq_lens
        if step.lengths is None:
            step.lengths = weakref.ref(new_seq_lens)
        violation = check_publish(
            step.decode, step.verified, step.published, own, step.indices is future_indices
        )
        step.published += 1
        step.written.published = True
        self._judge_step("future.publish", step, violation)

    def after_draft_extend(
        self, none: Any, worker: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step = self._now
        if step is not None and step.decode:
            spec = result.next_draft_input
            violation = self.custody.check_made(
                result.logits_output.hidden_states
            ) or self._check_next(step, spec)
            if violation is None:
                self.custody.hold(spec)
                self._read_left(step, spec)
            self.log.judge("worker.draft_extend", batch, violation)
            self.log.note("draft-extend", VERIFY, state_of(spec), len(step.requests))
        return none

    def _read_left(self, step: PendingStep, spec: Any) -> None:
        """Read the values with which the next step of these requests begins."""
        if self.judging:
            hidden = hidden_of(spec, step.worker)
            left = {h.LEFT_BONUS: step.worker.bonus(spec), h.LEFT_HIDDEN: self._digest(hidden)}
            self._read(step, left)

    def after_forward(self, result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._now
        if step is None:
            return result
        spec = result.next_draft_input
        whole = "verify" not in step.worker.sites  # the forward has verified itself
        if whole and step.decode:
            self._judge_verified(batch, step, result)
        violation = self._check_next(step, spec)
        if violation is None and whole and step.published:
            violation = step.check_lengths(result.new_seq_lens)
        if violation is None and step.decode and not whole:
            violation = self._left_by(batch, step, self.custody.check_held(spec), spec)
        elif violation is None:
            self.custody.hold(spec)
            self._read_left(step, spec)
            if self.judging and not step.decode:
                self._read(step, {h.NEW_LENS: result.new_seq_lens})
        if violation is None and step.overlap and not step.published:
            violation = check_published(step.decode)
        if not step.overlap:
            step.copies.close()
        if step.decode and self.judging:
            self.pending.add(result, step)
        self._made = weakref.ref(spec)
        self._judge_step("worker.forward", step, violation)
        self.log.note("end", VERIFY if step.decode else IDLE, state_of(spec), len(step.requests))
        return result

    def _left_by(
        self, batch: Any, step: PendingStep, stale: Violation | None, spec: Any
    ) -> Violation | None:
        """The same as :meth:`_named`, against what this step itself has just made."""
        if stale is None or spec.hidden_states is None:
            return stale
        made = (step.copies.get() or {}).get(h.LEFT_HIDDEN.key)
        if made is None:
            return stale
        taken = (h.LEFT_HIDDEN, digest(spec.hidden_states).tolist())
        return _in_row(stale, step.judged.check(stale.kind, (h.LEFT_HIDDEN, made), taken))

    def _check_next(self, step: PendingStep, spec: Any) -> Violation | None:
        """The next step's draft input must have a row for each request."""
        violation = check_state(state_of(spec, step.worker), type(spec).__name__, (DRAFT,))
        fields = fields_of(spec, relayed=True, worker=step.worker)
        return violation or check_fields(spec, fields, len(step.requests))

    # The values that it leaves for the next step.

    def before_stash(
        self, future_map: Any, future_indices: Any, payload: Any, *args: Any, **kwargs: Any
    ) -> None:
        step = self._now
        if step is None or not future_indices.shape[0]:
            return
        violation = None
        if step.indices is not future_indices:
            violation = Violation(
                "future-row",
                "the rows of the batch stashed",
                "other rows than those of the batch",
                what="stashed",
            )
        spec = self._made() if self._made is not None else None
        if violation is None and spec is not None:
            violation = self.custody.check_held(spec)
            hidden = getattr(spec, "hidden_states", None)
            if violation is None and hidden is not None:
                violation = Custody.check_relayed(
                    Mark.of(hidden), getattr(payload, "hidden_states", None)
                )
        step.stashed += 1
        step.written.stashed = True
        if self.judging:
            if step.decode:
                self._read(step, {h.STASHED: step.worker.bonus(payload)})
            step.copies.close()
        self._judge_step("future.stash", step, violation)

    def after_stash(self, result: Any, future_map: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = _relayed(future_map)
        if self._relayed is None and hidden is not None and hidden.is_inference():
            self.context.limit(
                "writes into hidden states are not noticed", "torch counts none in inference mode"
            )
        self._relayed = None if hidden is None else Mark.of(hidden)
        return result

    def after_run_batch(
        self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step, self._now = self._now, None
        if step is None:
            return result
        spec = batch.spec_info
        violation = self._check_on_batch(step, spec)
        if violation is None and step.overlap:
            if not step.stashed:
                violation = Violation(
                    "future-row",
                    f"{SEED} stashed in the FutureMap before the next step gathers them",
                    "not stashed",
                    what="not stashed",
                )
            elif spec.future_indices is not step.indices:
                violation = Violation(
                    "future-row",
                    "the rows of the batch in future_indices",
                    "other rows than those of the batch",
                    what="future_indices",
                )
        self._judge_step("scheduler.run_batch", step, violation, batch)
        return result

    def _check_on_batch(self, step: PendingStep, spec: Any) -> Violation | None:
        """After a step the batch has the draft input that this step's forward made, as it was."""
        made = self._made() if self._made is not None else None
        violation = check_state(state_of(spec, step.worker), type(spec).__name__, (DRAFT,))
        if violation is None and made is not None and spec is not made:
            return ANOTHER_OBJECT
        return violation or self.custody.check_held(spec)

    # Where the host learns what was accepted.

    def before_resolve(self, processor: Any, result: Any, batch: Any) -> None:
        self._processing = step = self.pending.take(result)
        if step is None:
            return
        if step.copies.lost:
            self.context.limit(
                "the values of some steps on the device are not checked",
                "more steps wait for their results than there are buffers for",
            )
        self._accepted = result.accept_lens.tolist()
        if step.last is not None:  # its values are followed
            step.tokens = result.next_token_ids.tolist()
        violation = step.check_result(self._accepted)
        # It must follow this result, too, where a finding does not stop the server.
        counted = self.committing.begin(step.requests)
        violation = violation or counted
        self._judge_step("result.resolve", step, violation)

    def after_resolve(self, kept: Any, processor: Any, result: Any, batch: Any) -> Any:
        step, self._processing = self._processing, None
        if step is not None:
            violation = self.committing.check(step.requests, self._accepted, kept)
            self._judge_step("result.resolve", step, violation or step.check_kept(kept))
            self.log.note(
                "result",
                "",
                "",
                len(step.requests),
                Accepted(self._accepted, step=step.number),
            )
        return kept

    def before_stream_output(self, streamer: Any, reqs: Any, *args: Any, **kwargs: Any) -> None:
        """Check before the tokens leave: nobody may get tokens that were counted twice."""
        if self.context.disabled:
            return  # a hook of ours is off, and what it should have counted is not known
        violation = self.committing.check_sent(reqs)
        if violation is not None:
            self.log.judge("scheduler.stream_output", None, violation, [str(r.rid) for r in reqs])

    def after_prepare_for_decode(self, result: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ahead is None or not self.judging or speculation.of(batch) is None:
            return result
        depth, width = self._ahead
        # With overlap, one verify is under way of which the host does not know the accept lengths.
        self._judge_room(batch, width + depth if batch.enable_overlap else width, committed)
        return result

    def _judge_room(self, batch: Any, ahead: int, books: Books) -> None:
        """Requests have room for ``ahead`` tokens more than ``books`` says is committed."""
        live, requests = running(batch)
        violation = check_allocated(
            [n + ahead for n in books(requests)],
            req_kv.column(requests, req_kv.ALLOCATED),
            f"{ahead} more than is committed",
        )
        step = self.context.recorder.event_step
        self.log.judge("batch.prepare_for_decode", batch, at_rows(violation, live), step=step)

    def _judge_step(
        self, site: str, step: PendingStep, violation: Violation | None, batch: Any = None
    ) -> None:
        """The violation, if there is one, belongs to ``step``."""
        rids = step.rids if violation is not None else None
        self.log.judge(site, batch, violation, rids, step=step.number)


def no_draft(scheduler: Any) -> str:
    """Why there is no speculative step to check: nobody drafts, or a worker that is not known."""
    algorithm = getattr(scheduler, "spec_algorithm", None)
    if algorithm is None or algorithm.is_none():
        return "this server does not speculate"
    worker = type(getattr(scheduler, "draft_worker", None)).__name__
    return f"{algorithm.name} is run here by {worker}, which g4debug does not know"


def unknown(server_args: Any) -> list[str]:
    """Features of this server with which the tracer was never run, in words."""
    found = []
    if server_argument(server_args, "disaggregation_mode", "null") != "null":
        found.append("prefill and decode are disaggregated, so another server begins the requests")
    if server_argument(server_args, "pp_size", 1) > 1:
        found.append("with pipeline parallelism other ranks draft and verify")
    if server_argument(server_args, "enable_pdmux"):
        found.append("--enable-pdmux runs prefill beside decode")
    if server_argument(server_args, "enable_mixed_chunk"):
        found.append("with --enable-mixed-chunk a step may prefill and decode at once")
    if server_argument(server_args, "speculative_adaptive"):
        found.append("with --speculative-adaptive the number of drafts changes in a step")
    if dp_attention(server_args):
        found.append("with DP attention a rank idles in a draft, and batches are padded")
    return found


def not_run(adapter: speculation.Adapter, on_cpu: bool) -> str:
    """Why a worker that is known is not judged, in words."""
    where = "the CPU engine" if on_cpu else "a GPU"
    return (
        f"{adapter.name} was never run with this tracer on {where} and SGLang "
        f"{targets.sglang_version()}; G4DEBUG_MODE=log reports only, and "
        "G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1 takes that risk"
    )


def follows_values(settings: Any) -> bool:
    """True if the values that a step hands on are compared.

    What a verify that samples hands on comes from other kernels on a GPU than on the CPU engine. On
    SGLang 0.5.23 that was run there, with temperatures and grammars, but it costs the host some
    1.5 ms of each decode step (docs/costs.md); on older releases, if g4debug has a wrong idea of
    it, a finding is false. So on a GPU values are compared only in mode ``log``, or if
    G4DEBUG_NOT_RUN_ON_THIS_RELEASE asks for it.
    """
    if settings.cpu or not torch.cuda.is_available():
        return True
    return bool(settings.takes_the_risk)


def simulates() -> bool:
    """True if SGLang makes up how many tokens are accepted, for measurements."""
    try:
        utils = importlib.import_module("sglang.srt.speculative.spec_utils")
    except ImportError:
        return False
    return bool(getattr(utils, "SIMULATE_ACC_LEN", 0) > 0)


def decodes(batch: Any) -> bool:
    return bool(speculation.of(batch) and batch.reqs and batch.forward_mode.is_decode())


def running(batch: Any) -> tuple[list[int], list[Any]]:
    """The positions in the batch of the requests that go on, and these requests.

    A request may have ended after its batch was formed: with a grammar, SGLang processes the last
    result between the two. Then it runs once more, without a row.
    """
    live = live_rows(batch.reqs)
    return live, [batch.reqs[i] for i in live]


def _in_row(stale: Violation, found: Violation | None) -> Violation:
    """A finding about hidden states, with the row in which ``found`` says they are another's."""
    if found is None:
        return stale
    whose = f"that of {found.whose}" if found.whose else "nobody's of this batch"
    got = f"{stale.got}, in which row {found.row} is {whose}"
    return replace(stale, row=found.row, got=got, whose=found.whose)


def _relayed(future_map: Any) -> Any:
    return getattr(future_map, "hidden_states_buf", None)


def install(context: Context) -> None:
    older = older_module(__name__)
    if older is None:
        SpecLifecycle(context).install()
    else:
        older.install(context)


TRACER = Tracer(
    id="spec-lifecycle",
    title="batch.spec_info is what the next hand-over needs, and accepted tokens count once",
    install=install,
    steady=(VERIFIES,),
)
