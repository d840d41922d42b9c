"""Holds a decode step back on the device, until the result before it is processed by half.

Nothing but time changes: the device sleeps on the streams on which it computes anyway. The forward
sleeps before it builds its page table, longer than the host needs to process a result. The
scheduling stream sleeps before it writes a request's row anew, which is a moment after it has
cleared that request's entries of the mapping. So the forward comes in between, as it may by itself.
"""

from __future__ import annotations

import functools
from typing import Any

FORWARD, ROW = 40_000_000, 120_000_000  # cycles: 20 and 60 ms at 2 GHz


def install() -> None:
    import torch
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    decode: list[bool] = []  # one entry while a decode step is launched
    processing: list[bool] = []  # one entry while a result is processed

    def during(owner: Any, name: str, entries: list[bool], when: Any) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def noted(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            entries[:] = [True] * when(batch)
            try:
                return original(scheduler, batch, *args, **kwargs)
            finally:
                entries.clear()

        setattr(owner, name, noted)

    def late(owner: Any, name: str, entries: list[bool], cycles: int) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def slept(*args: Any, **kwargs: Any) -> Any:
            if entries and torch.cuda.is_available():
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            return original(*args, **kwargs)

        setattr(owner, name, slept)

    during(Scheduler, "run_batch", decode, lambda batch: batch.forward_mode.is_decode())
    during(Scheduler, "process_batch_result", processing, lambda batch: True)
    late(TRTLLMHAAttnBackend, "_fill_page_table_device", decode, FORWARD)
    late(ReqToTokenPool, "write", processing, ROW)
