"""Counts the prefills that are merged into a batch in which all requests have finished.

The upstream fix (0.5.13, ``FrozenKVMTPWorker._draft_preprocess_idle``) puts an idle draft input on
such a batch. Without it the batch keeps its verify input, which cannot be merged.
"""

from __future__ import annotations

from typing import Any

from suites.history.counter import Counter, around


def install(counter: Counter) -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPVerifyInput

    @around(ScheduleBatch, "merge_batch")
    def merge(batch: Any, other: Any) -> None:
        if not batch.reqs or not other.reqs or not all(r.finished() for r in batch.reqs):
            return
        counter.reached()
        if isinstance(batch.spec_info, FrozenKVMTPVerifyInput):
            counter.triggered("a prefill is merged into a batch that still has its verify input")
