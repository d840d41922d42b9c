"""Checks ``spec_info`` where the scheduler changes a batch: ``merge_batch``, ``filter_batch``."""

from __future__ import annotations

from typing import Any

from g4debug import speculation
from g4debug.tracers.spec_lifecycle.check import DRAFT, IDLE, Violation, check_state
from g4debug.tracers.spec_lifecycle.hidden_states import Custody
from g4debug.tracers.spec_lifecycle.log import SpecLog
from g4debug.tracers.spec_lifecycle.spec_info import (
    check_draft_input,
    check_fields,
    state_of,
)


class SpecBatches:
    """Hooks on ``merge_batch`` and ``filter_batch``.

    A draft input has one row for each request of the batch, finished or not. With overlap
    scheduling these rows are in ``future_indices``.
    """

    def __init__(self, log: SpecLog, custody: Custody) -> None:
        self.log = log
        self.custody = custody
        self._worker: speculation.Adapter | None = None  # of the batch that is changed
        self._merging = ""  # the state before the current merge
        # The state, the number of requests and the spec_info before the current filter.
        self._filtering: tuple[str, int, Any] = ("", 0, None)

    def before_merge(self, batch: Any, other: Any) -> None:
        self._worker = worker = speculation.of(batch)
        if worker is None:
            return
        for side in (batch, other):
            spec = side.spec_info
            violation = check_state(state_of(spec, worker), type(spec).__name__, self.allowed(side))
            if violation is None and spec is not None:
                violation = self.check_rows(spec, self.rows(side))
            note = "the batch that is merged into" if side is batch else "the batch that joins"
            self.log.judge("batch.merge", side, violation, note=note)
        self._merging = state_of(batch.spec_info)

    def after_merge(self, result: Any, batch: Any, other: Any) -> Any:
        if speculation.of(batch) is not None:
            self.custody.hold(batch.spec_info)
            self.log.note("merge", self._merging, state_of(batch.spec_info), len(batch.reqs))
        return result

    def allowed(self, batch: Any) -> tuple[str, ...]:
        """The states of a batch that is merged."""
        # A prefill that takes the running requests in has not run yet.
        return (DRAFT, IDLE) if batch.forward_mode.is_mixed() else (DRAFT,)

    def rows(self, batch: Any) -> int:
        """How many rows the draft input of a batch that is merged must have."""
        return len(batch.reqs)

    def check_rows(self, spec: Any, requests: int) -> Violation | None:
        """A draft input has so many rows."""
        if spec.future_indices is not None:
            fields = check_fields(spec, ("future_indices",), requests)
            return fields or self.custody.check_held(spec)
        return check_draft_input(self.custody, spec, requests, self._worker)

    def before_filter(
        self,
        batch: Any,
        chunked_req_to_exclude: Any = None,
        keep_indices: Any = None,
        *a: Any,
        **k: Any,
    ) -> None:
        self._worker = worker = speculation.of(batch)
        if worker is None:
            return
        spec = batch.spec_info
        self._filtering = state_of(spec, worker), len(batch.reqs), spec
        if keep_indices is None:
            live = any(not r.finished() for r in batch.reqs)
        else:
            live = bool(keep_indices)
        if live:
            # No spec_info is no violation here: a batch that has not run yet has none.
            violation = check_state(state_of(spec, worker), type(spec).__name__, (DRAFT, IDLE))
            self.log.judge("batch.filter", batch, violation or self.custody.check_held(spec))

    def after_filter(self, result: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        worker = speculation.of(batch)
        if worker is None:
            return result
        (before, had, was), spec, requests = self._filtering, batch.spec_info, len(batch.reqs)
        self._filtering = before, had, None  # it must not keep the old one alive
        if had == requests and spec is was and self.custody.holds(spec):
            return result  # SGLang left the batch as it was, and that was judged before
        state = state_of(spec, worker)
        if requests and state == DRAFT:
            self.custody.hold(spec)
            self.log.judge("batch.filter", batch, self.check_rows(spec, requests))
        if had != requests:
            self.log.note(
                "filter", before, state, requests, f"{had - requests} of {had} requests removed"
            )
        return result
