"""Records the last steps of the scheduler in host memory.

After a CUDA error nothing can be read from the device any more. So what a dump needs is recorded
here while all is well. Only what SGLang has in host memory anyway is read, which never waits for
the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from g4debug.findings.record import Pool, Step
from g4debug.findings.status import Status


class Recorder:
    """Keeps the last ``size`` steps. ``step`` counts them from 1, and is 0 before the first.

    status: what each tracer of this process can judge, see :mod:`g4debug.findings.status`.
    """

    def __init__(self, size: int) -> None:
        self.steps: deque[Step] = deque(maxlen=size)
        self.step = 0
        self.rank = -1
        self.scheduler: Any = None
        self.status = Status(self)
        self._rids: dict[int, str] = {}

    def attach(self, scheduler: Any) -> None:
        """Remember the scheduler of this process; pools, sizes and rank are read from it."""
        self.scheduler = scheduler
        self.rank = int(getattr(scheduler, "tp_rank", -1))

    def begin_step(self, batch: Any) -> None:
        """Count and record a ``ScheduleBatch`` that is about to run."""
        self.count()
        self.record(batch)

    def count(self) -> None:
        """Count a step. It is not part of ``record``: whatever is done every so many steps must go
        on when a step cannot be recorded.
        """
        self.step += 1
        self._rids = {}  # those of the step before would be wrong if this one is not recorded

    def record(self, batch: Any) -> None:
        """Record the step that was counted last. An unknown kind of batch may make this raise."""
        # Noted now: a request that ends in this step gives its row back before anybody looks.
        self._rids = {
            int(r.req_pool_idx): str(r.rid) for r in batch.reqs if r.req_pool_idx is not None
        }
        lengths = batch.seq_lens_cpu
        spec = getattr(batch, "spec_info", None)
        used = {pool.name: pool.used_tokens for pool in self.pools()}
        waiting = getattr(self.scheduler, "waiting_queue", None)
        reqs = batch.reqs
        self.steps.append(
            Step(
                step=self.step,
                forward_mode=batch.forward_mode.name if batch.forward_mode else "",
                rids=tuple([str(r.rid) for r in reqs]),
                seq_lens=tuple(lengths.tolist()) if lengths is not None else (),
                spec_info=type(spec).__name__ if spec is not None else "",
                full_used=used.get("full", -1),
                swa_used=used.get("swa", -1),
                time_ns=time.time_ns(),
                waiting=-1 if waiting is None else len(waiting),
                rows=tuple([-1 if r.req_pool_idx is None else int(r.req_pool_idx) for r in reqs]),
                committed=_column(reqs, "kv_committed_len"),
                allocated=_column(reqs, "kv_allocated_len"),
                evicted=_column(reqs, "swa_evicted_seqlen"),
            )
        )

    @property
    def current(self) -> Step | None:
        """The step that was counted last, None if it was not recorded."""
        last = self.steps[-1] if self.steps else None
        return last if last is not None and last.step == self.step else None

    def requests_by_pool_index(self) -> dict[int, str]:
        """Row of ``req_to_token`` -> rid, for the requests of the running batch."""
        return self._rids

    def pools(self) -> tuple[Pool, ...]:
        """Sizes and use of the target's KV pools, as the allocator knows them on the host."""
        allocator = getattr(self.scheduler, "token_to_kv_pool_allocator", None)
        if allocator is None:
            return ()
        page = int(allocator.page_size)
        if hasattr(allocator, "full_available_size"):
            return (
                _pool("full", int(allocator.size_full), allocator.full_available_size(), page),
                _pool("swa", int(allocator.size_swa), allocator.swa_available_size(), page),
            )
        return (_pool("full", int(allocator.size), allocator.available_size(), page),)


def _pool(name: str, tokens: int, available: int, page_size: int) -> Pool:
    # A pool of N tokens has N / page_size allocatable pages and the reserved page 0.
    return Pool(name, tokens // page_size + 1, page_size, tokens, tokens - int(available))


def _column(reqs: Sequence[Any], name: str) -> tuple[int, ...]:
    """One number for each request. () if the requests of this SGLang do not have it."""
    try:
        return tuple([getattr(r, name) for r in reqs])
    except AttributeError:
        return ()
