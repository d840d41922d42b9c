"""Counts the chunks of a prompt that begin before the end of the chunk before them.

The situation: a request that skips the prefix cache has had a chunk of its prompt computed, and
gets its next one. The upstream fix (0.5.23, ``mem_cache/common.py``, ``checkpoint_kv_cache``)
records how far the request has come. Without it the next chunk begins where the first one did: it
gets new pages, they replace the old ones in the request's row, and nobody frees the old ones.
"""

from __future__ import annotations

from typing import Any

from suites.history.counter import Counter, around


def install(counter: Counter) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    ends: dict[str, int] = {}  # request with a prompt that is not done -> tokens that have pages

    @around(Scheduler, "run_batch")
    def run_batch(_scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        if not batch.forward_mode.is_extend():
            return
        for req, begin, length in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            if not req.skip_radix_cache_insert:
                continue
            end = ends.pop(req.rid, 0)
            if end:
                counter.reached()
            if begin < end:
                counter.triggered(f"a chunk begins at token {begin}, pages are there up to {end}")
            if begin + length < len(req.origin_input_ids):
                ends[req.rid] = begin + length
