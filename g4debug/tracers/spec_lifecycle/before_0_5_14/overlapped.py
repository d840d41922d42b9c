"""spec-lifecycle for FROZEN_KV_MTP on 0.5.12.post1's v2, which the path frozen-kv-mtp-v2 brings.

The rules are the ones that today's tracer checks on releases with a v2 worker of their own. Three
things are different here:

* SGLang's FutureMap is a ring. Each step gets rows of its own in it, and the next step reads them
  by ``future_indices``. Nothing is published apart from that.
* ``prepare_for_decode`` adds 1 to ``kv_committed_len`` in advance, and the processing of the
  result takes it back. So the number of committed tokens is SGLang's, less one for each step of
  the request that is under way (:class:`Claims`).
* ``seq_lens_cpu`` is a bound, because nobody waits for the lengths. The device's lengths must not
  be above it, and must equal the number of committed tokens.

A server decides for v1 or v2 when its scheduler is made. :func:`install` follows both, and only
the one that serves judges.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

from g4debug import speculation
from g4debug.hooking import req_kv
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.batches import SpecBatches
from g4debug.tracers.spec_lifecycle.check import (
    DRAFT,
    IDLE,
    VERIFY,
    Violation,
    at_rows,
    check_bound,
    check_state,
    check_written,
)
from g4debug.tracers.spec_lifecycle.copies import Copies
from g4debug.tracers.spec_lifecycle.future_rows import SEED
from g4debug.tracers.spec_lifecycle.hidden_states import Custody
from g4debug.tracers.spec_lifecycle.pending_steps import BONUS, INDICES, LENS, NEW_LENS, PendingStep
from g4debug.tracers.spec_lifecycle.spec_info import check_fields, state_of
from g4debug.tracers.spec_lifecycle.token_commit import Committing
from g4debug.tracers.spec_lifecycle.tracer import (
    ANOTHER_OBJECT,
    Hooked,
    SpecLifecycle,
    decodes,
    running,
)

FIELDS = ("bonus_tokens", "topk_index", "hidden_states", "new_seq_lens")


class Claims:
    """For each request, how many of its steps were prepared and not yet processed."""

    def __init__(self) -> None:
        self._claims: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def prepared(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self._claims[request] = self._claims.get(request, 0) + 1

    def processed(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self._claims[request] = max(0, self._claims.get(request, 0) - 1)

    def forget(self, requests: Sequence[Any]) -> None:
        """These are prefilled, which begins their books anew."""
        for request in requests:
            self._claims.pop(request, None)

    def books(self, requests: Sequence[Any]) -> list[int]:
        """Each request's committed tokens, without those that SGLang counted in advance."""
        claimed = req_kv.column(requests, req_kv.COMMITTED)
        return [n - self._claims.get(r, 0) for n, r in zip(claimed, requests, strict=True)]


class Ring:
    """Which rows of the FutureMap each request's last step got, and who has a row now."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[weakref.ref[Any], str, int]] = {}  # request, its rid, the step
        self._row_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def stored(self, first: int, requests: Sequence[Any], step: int) -> None:
        """These requests' step stored its rows, from ``first`` on."""
        for row, request in enumerate(requests, first):
            self._rows[row] = (weakref.ref(request), str(request.rid), step)
            self._row_of[request] = row

    def lost(self, requests: Sequence[Any]) -> None:
        """These requests' step stored nothing."""
        for request in requests:
            self._row_of.pop(request, None)

    def rows(self, requests: Sequence[Any]) -> list[int]:
        """The row that each request's last step got, -1 if it got none."""
        return [self._row_of.get(r, -1) for r in requests]

    def check(self, requests: Sequence[Any]) -> Violation | None:
        """These requests read their rows now, which must still be theirs."""
        for i, row in enumerate(self.rows(requests)):
            owner, rid, step = self._rows.get(row, (None, "", 0))
            if owner is None:
                return check_written(SEED, row, str(requests[i].rid), None, i)
            if owner() is not requests[i]:
                return check_written(SEED, row, str(requests[i].rid), (rid, step), i)
        return None


class RingBatches(SpecBatches):
    """The rows of a draft input in the FutureMap are in an object of their own."""

    def check_rows(self, spec: Any, requests: int) -> Violation | None:
        rows = spec.future_indices
        if rows is None:
            return super().check_rows(spec, requests)
        return check_fields(rows, ("indices",), requests) or self.custody.check_held(spec)


class SpecLifecycleOverlapped(SpecLifecycle):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.batches = RingBatches(self.log, self.custody)
        self.claims = Claims()
        self.ring = Ring()
        self.committing = Committing(self.claims.books, cuts=True)
        self.judging = True
        self._reads: list[int] = []  # the rows that this step must read

    def hooks(self) -> tuple[Hooked, ...]:
        return (
            ("overlap.resolve", self.before_read, self.after_gather),
            ("overlap.forward", self.before_step, self.after_step),
            ("overlap.verify", self.before_verify, self.after_verify),
            ("overlap.store", self.before_store, self.after_store),
            ("scheduler.run_batch", None, self.after_run_batch),
            ("result.resolve_overlap", self.before_resolve, self.after_resolve),
            ("scheduler.stream_output", self.before_stream_output, None),
            ("batch.prepare_for_decode", None, self.after_prepare_for_decode),
            ("batch.merge", self.batches.before_merge, self.batches.after_merge),
            ("batch.filter", self.batches.before_filter, self.batches.after_filter),
        )

    # The values that a step reads from the step before.

    def before_read(self, future_map: Any, batch: Any) -> None:
        self._now, self._reads = None, []
        if not decodes(batch):
            return
        spec = batch.spec_info
        violation = check_state(state_of(spec), type(spec).__name__, (DRAFT,))
        if violation is None:
            violation = check_fields(
                getattr(spec, "future_indices", None), ("indices",), len(batch.reqs)
            )
        if violation is None and self.judging:
            live, requests = running(batch)
            violation = at_rows(self.ring.check(requests), live)
            if violation is None and self._relayed is not None:
                buffer = getattr(future_map, "hidden_states_buf", None)
                violation = Custody.check_relayed(self._relayed, buffer)
        self.log.judge("future.gather", batch, violation)
        self._reads = self.ring.rows(batch.reqs)

    # The worker's step.

    def before_step(self, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._now = None
        adapter = speculation.of(batch)
        if adapter is None or not batch.reqs:
            return
        decode = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch)
        depth, width = worker.speculative_num_steps + 1, worker.speculative_num_draft_tokens
        self._ahead = (depth, width)
        self._now = step = BoundedStep(
            number=self.context.recorder.step,
            decode=decode,
            overlap=True,
            requests=tuple(batch.reqs),
            rows=self._reads,
            indices=None,
            lens=batch.seq_lens_cpu.tolist(),
            allocated=req_kv.column(batch.reqs, req_kv.ALLOCATED),
            depth=depth,
            width=width,
            copies=Copies(self.pool),
            worker=adapter,
            books=self.claims.books,
        )
        if not decode:
            self.committing.forget(batch.reqs)
            self.claims.forget(batch.reqs)
            return
        spec, requests = batch.spec_info, len(batch.reqs)
        violation = check_state(state_of(spec), type(spec).__name__, (DRAFT,))
        if violation is None:
            violation = check_fields(spec, FIELDS, requests) or self.custody.check_held(spec)
        if violation is None and self.judging:
            step.copies.start(INDICES, spec.future_indices.indices)
            step.copies.start(LENS, batch.seq_lens)
            step.copies.start(BONUS, spec.bonus_tokens)
        self.log.judge("worker.draft", batch, violation)

    def after_verify(self, result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._now
        if step is None or not step.decode:
            return result
        step.verified = True
        requests = len(step.requests)
        self.log.judge(
            "worker.verify",
            batch,
            check_fields(result, ("accept_lens",), requests)
            or check_fields(result.next_draft_input, ("bonus_tokens", "new_seq_lens"), requests)
            or self.custody.made_by_forward(result.logits_output.hidden_states),
        )
        if self.judging:
            # The new length may be smaller for a request that has filled the context and so ended.
            # The next step's lengths are compared with the books.
            step.copies.start(NEW_LENS, result.next_draft_input.new_seq_lens)
        self.log.note("verify", VERIFY, state_of(batch.spec_info), requests)
        return result

    def after_step(self, result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._now
        if step is None:
            return result
        spec = result.next_draft_input
        violation = check_state(state_of(spec), type(spec).__name__, (DRAFT,))
        violation = violation or check_fields(spec, FIELDS, len(step.requests))
        if violation is None and step.decode:
            violation = self.custody.check_made(result.logits_output.hidden_states)
        step.copies.close()
        if violation is None:
            self.custody.hold(spec)
        if step.decode and self.judging:
            self.pending.add(result, step)
        else:
            step.copies.drop()
        self._made = weakref.ref(spec)
        self._judge_step("worker.forward", step, violation)
        before = VERIFY if step.decode else IDLE
        self.log.note("end", before, state_of(spec), len(step.requests))
        return result

    # The values that it leaves for the next step.

    def before_store(self, future_map: Any, future_indices: Any, result: Any) -> None:
        step = self._now
        if step is None:
            return
        rows = future_indices.interval
        spec = self._made() if self._made is not None else None
        violation = None
        if result.next_draft_input is not spec:
            violation = ANOTHER_OBJECT
        elif rows.stop - rows.start != len(step.requests):
            violation = Violation(
                "future-row",
                f"rows of {len(step.requests)} requests stored in the FutureMap",
                f"rows of {rows.stop - rows.start} requests",
                what="stored",
            )
        violation = violation or self.custody.check_held(spec)
        self.ring.stored(rows.start, step.requests, step.number)
        step.indices = future_indices
        step.stashed += 1
        self._judge_step("future.stash", step, violation)

    def after_store(self, result: Any, future_map: Any, *args: Any, **kwargs: Any) -> Any:
        return self.after_stash(result, future_map)

    def after_run_batch(
        self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step, self._now = self._now, None
        if step is None:
            return result
        spec = batch.spec_info
        violation = self._check_on_batch(step, spec)
        if violation is None and not step.stashed:
            self.ring.lost(step.requests)
            violation = Violation(
                "future-row",
                f"{SEED} stored in the FutureMap before the next step reads them",
                "not stored",
                what="not stashed",
            )
        if violation is None and spec.future_indices is not step.indices:
            violation = Violation(
                "future-row",
                "the rows that this step stored in future_indices",
                "other rows",
                what="future_indices",
            )
        if violation is None and batch.seq_lens is not spec.new_seq_lens:
            violation = Violation(
                "seq-len",
                "batch.seq_lens of the draft-input that this step made",
                "another tensor",
                what="seq_lens",
            )
        self._judge_step("scheduler.run_batch", step, violation, batch)
        return result

    # Where the host learns what was accepted.

    def after_resolve(self, kept: Any, processor: Any, result: Any, batch: Any) -> Any:
        self.claims.processed(batch.reqs)
        return super().after_resolve(kept, processor, result, batch)

    def after_prepare_for_decode(self, result: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if speculation.of(batch) is None:
            return result
        self.claims.prepared(batch.reqs)
        if self._ahead is not None and self.judging:
            # A verify that is under way, and this one.
            self._judge_room(batch, sum(self._ahead), self.claims.books)
        return result


class BoundedStep(PendingStep):
    """A step for which the host has only upper bounds of the lengths on the device."""

    def _check_inputs(
        self,
        values: dict[str, Sequence[int]],
        some: Callable[[Sequence[Any]], Sequence[Any]],
        requests: Sequence[Any],
    ) -> Violation | None:
        bounds, self.lens = self.lens, None
        violation = super()._check_inputs(values, some, requests)
        lens = values.get(LENS)
        if violation is None and lens is not None and bounds is not None:
            violation = check_bound("seq_lens on the device", some(bounds), lens)
        return violation


class Gate:
    """A tracer's context. The hooks that it sets do nothing while it is shut."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.open = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def before(self, site: str, hook: Callable[..., None], optional: bool = False) -> None:
        def gated(*args: Any, **kwargs: Any) -> None:
            if self.open:
                hook(*args, **kwargs)

        self._context.before(site, gated, optional)

    def after(self, site: str, hook: Callable[..., Any], optional: bool = False) -> None:
        def gated(result: Any, *args: Any, **kwargs: Any) -> Any:
            return hook(result, *args, **kwargs) if self.open else result

        self._context.after(site, gated, optional)


def install(context: Context, v1: Callable[[Context], Any], not_by_value: tuple[str, str]) -> None:
    """Follow v1's worker and v2's. v1: makes what follows v1's, which has an ``install``.

    not_by_value: a limit that both have.
    """
    first, second = Gate(context), Gate(context)
    second.open = False
    v1(cast("Context", first)).install()
    tracer = SpecLifecycleOverlapped(cast("Context", second))
    for site, before, after in tracer.hooks():
        if before is not None:
            second.before(site, before)
        if after is not None:
            second.after(site, after)

    def after_scheduler_init(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if speculation.of(scheduler) is not None and scheduler.enable_overlap:
            first.open, second.open = False, True
            tracer.after_scheduler_init(result, scheduler, *args, **kwargs)
            context.limit(*not_by_value)
        return result

    context.after("scheduler.init", after_scheduler_init)
