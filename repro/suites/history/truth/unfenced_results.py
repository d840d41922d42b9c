"""Counts pages in a decode step's window that lose their SWA half between launch and read.

The situation: the result of a prefill is processed while a later batch is in flight, and the prefix
cache re-points the mapping from full to SWA positions. The upstream fix (#31687; 0.5.18,
``Scheduler.event_loop_overlap``) lets the scheduling stream wait for the launched forward's reads
before that. Without it, the forward may find 0 for a page that had a SWA half when the forward was
launched. Whether it did is counted on the device, and read when the next batches are launched. A
request that the last result has ended does not count: SGLang throws its part of the forward away.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from suites.history.counter import Counter, around

IN_FLIGHT = 8  # so many launches' tables are kept, longer than their forwards run


@dataclass
class Step:
    """A decode step. cleared: the pages of each row, on the host once the event is over.

    ended: the rows of requests that the last result has ended, None until that is processed.
    """

    requests: list[Any]
    cleared: Any
    event: Any = None
    ended: set[int] | None = None


def install(counter: Counter) -> None:
    import torch
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    launched: deque[tuple[Any, Any]] = deque(maxlen=IN_FLIGHT)  # rows and mapping as of launch
    decode: list[list[Any]] = []  # the requests of a decode step, while it is launched
    processing: list[bool] = []  # one entry while a result is processed and a later batch runs
    steps: deque[Step] = deque()

    @around(Scheduler, "run_batch")
    def launch(scheduler: Any, batch: Any, *_: Any, **__: Any) -> Any:
        look()
        mapping = scheduler.token_to_kv_pool_allocator.full_to_swa_index_mapping
        launched.append((scheduler.req_to_token_pool.req_to_token.clone(), mapping.clone()))
        decode[:] = [list(batch.reqs)] * batch.forward_mode.is_decode()
        return lambda _result: decode.clear()

    def look() -> None:
        while steps and (steps[0].event is None or steps[0].event.query()):
            step = steps.popleft()
            ended = step.ended or set()
            cleared = sum(n for i, n in enumerate(step.cleared.tolist()) if i not in ended)
            if cleared:
                counter.triggered(f"{cleared} pages in the window of a decode step read page 0")

    @around(TRTLLMHAAttnBackend, "_fill_page_table_device")
    def build(backend: Any, metadata: Any, rows: Any, lengths: Any) -> Any:
        if not decode or metadata.swa_page_table is None:
            return None
        tokens, mapping = launched[-1]
        requests = decode[0]

        def after(_result: Any) -> None:
            size, table = backend.page_size, metadata.swa_page_table
            pages = torch.arange(table.shape[1], device=table.device)
            last = (lengths.long() - 1) // size
            oldest = (lengths.long() - backend_window(backend)).clamp(min=0) // size
            inside = (pages >= oldest[:, None]) & (pages <= last[:, None])
            first_of_page = (pages * size).clamp(max=tokens.shape[1] - 1)
            then = mapping[tokens[rows.long()][:, first_of_page].long()]
            cleared = (inside & (table <= 0) & (then > 0)).sum(1)
            if not cleared.is_cuda:
                steps.append(Step(requests, cleared))
                return
            here = torch.empty_like(cleared, device="cpu", pin_memory=True)
            here.copy_(cleared, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            steps.append(Step(requests, here, event))

        return after

    @around(Scheduler, "process_batch_result")
    def process(scheduler: Any, batch: Any, *_: Any, **__: Any) -> Any:
        later = bool(getattr(scheduler, "result_queue", ()))
        processing[:] = [True] * (later and batch.forward_mode.is_extend())

        def after(_result: Any) -> None:
            processing.clear()
            for step in steps:
                if step.ended is None:
                    step.ended = {i for i, r in enumerate(step.requests) if r.finished()}

        return after

    @around(SWATokenToKVPoolAllocator, "set_full_to_swa_mapping")
    def remap(_allocator: Any, full: Any, *_: Any, **__: Any) -> None:
        if processing and full.numel():
            counter.reached()


def backend_window(backend: Any) -> int:
    """Tokens that a sliding layer sees, its own among them: the toy model's, and most models'."""
    return int(getattr(backend, "sliding_window_size", None) or 127) + 1
