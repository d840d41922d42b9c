"""Counts the eager drafts of FROZEN_KV_MTP, and those that still have an earlier step's places.

An earlier step's places are told by their number, which is not the batch's.

The upstream fix (#29616; 0.5.15.post1, ``FrozenKVMTPDraftWorker.draft``) sets ``out_cache_loc`` to
None, because this draft never writes KV.
"""

from __future__ import annotations

from typing import Any

from suites.history.counter import Counter, around


def install(counter: Counter) -> None:
    from sglang.srt.speculative.frozen_kv_mtp_worker_v2 import FrozenKVMTPDraftWorker

    @around(FrozenKVMTPDraftWorker, "draft_forward")
    def draft(worker: Any, batch: Any) -> None:
        counter.reached()
        places = batch.out_cache_loc
        if places is not None and len(places) != batch.batch_size:
            counter.triggered(f"{len(places)} places for a draft of {batch.batch_size} tokens")
