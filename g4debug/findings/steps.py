"""Records the last steps of the scheduler in host memory.

After a CUDA error nothing can be read from the device any more. So what a dump needs is recorded
here while all is well. Only what SGLang has in host memory anyway is read, which never waits for
the device.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from g4debug.findings.record import Pool, Step
from g4debug.findings.status import Status
from g4debug.hooking import req_kv
from g4debug.hooking.resolved import server_argument

FIELDS = (req_kv.ROW, req_kv.COMMITTED, req_kv.ALLOCATED)  # of each request of a step


class Ranks(NamedTuple):
    """The ranks of a scheduler: data-, tensor- and pipeline-parallel. -1: not known."""

    dp: int = -1
    tp: int = -1
    pp: int = -1


class Recorder:
    """Keeps the last ``size`` steps. ``step`` counts them from 1, and is 0 before the first.

    ``event_step`` is the step that an event of now belongs to: the one that is being prepared
    (SGLang allocates for a batch before it runs it), or else the one that began last.

    preparing: whether a step is being prepared.
    status: what each tracer of this process can judge, see :mod:`g4debug.findings.status`.
    also: gets the fields of each step, in the order of :meth:`record`.
    """

    def __init__(self, size: int) -> None:
        # The fields of each step. They become a Step only if somebody reads them: to make one takes
        # as long as all other work here.
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=size)
        self.step = 0
        self.scheduler: Any = None
        self.preparing = False
        self.status = Status(self)
        self.also: Callable[[tuple[Any, ...]], None] | None = None
        self._rids: dict[int, str] = {}

    @property
    def steps(self) -> tuple[Step, ...]:
        """The last steps, oldest first."""
        return tuple(map(_step, self._kept.copy()))  # another thread may read them

    def attach(self, scheduler: Any) -> None:
        """Remember the scheduler of this process; pools, sizes and ranks are read from it.

        It may still be starting: what it does not have yet is not known.
        """
        self.scheduler = scheduler

    @property
    def ranks(self) -> Ranks:
        """The ranks of this process's scheduler, as far as it knows them by now."""
        return ranks(self.scheduler)

    @property
    def rank(self) -> int:
        """The tensor-parallel rank, -1 if not known."""
        return self.ranks.tp

    @property
    def event_step(self) -> int:
        return self.step + self.preparing

    def prepare_step(self) -> None:
        """A batch is being prepared. The next step is its own."""
        self.preparing = True

    def begin_step(self, batch: Any) -> None:
        """Count and record a ``ScheduleBatch`` that is about to run."""
        self.count()
        self.record(batch)

    def count(self) -> None:
        """Count a step. It is not part of ``record``: whatever is done every so many steps must go
        on when a step cannot be recorded.
        """
        self.step += 1
        self.preparing = False
        self._rids = {}  # the last step's would be wrong if this step is not recorded

    def record(self, batch: Any) -> None:
        """Record the step that was counted last. An unknown kind of batch may make this raise."""
        # Noted now: a request that ends in this step gives its row back before anybody looks.
        reqs = batch.reqs
        rids = [str(r.rid) for r in reqs]
        if req_kv.evicts_by_component(reqs):
            rows, committed, allocated = req_kv.columns(reqs, FIELDS)
            evicted = _evicted(reqs)
        else:
            rows, committed, allocated, evicted = req_kv.columns(reqs, (*FIELDS, req_kv.EVICTED))
        if None in rows:
            rows = [-1 if row is None else row for row in rows]
        self._rids = {row: rid for row, rid in zip(rows, rids, strict=True) if row >= 0}
        lengths = batch.seq_lens_cpu
        spec = getattr(batch, "spec_info", None)
        used = [tokens - available for _, tokens, available in pool_sizes(self.scheduler)]
        waiting = getattr(self.scheduler, "waiting_queue", None)
        mode = batch.forward_mode
        kept = (
            self.step,
            mode.name if mode else "",
            rids,
            lengths.tolist() if lengths is not None else [],
            "" if spec is None else type(spec).__name__,
            used,
            time.time_ns(),
            -1 if waiting is None else len(waiting),
            rows,
            committed,
            allocated,
            evicted,
        )
        self._kept.append(kept)
        if self.also is not None:
            self.also(kept)

    @property
    def current(self) -> Step | None:
        """The step that was counted last, None if it was not recorded."""
        last = self._kept[-1] if self._kept else None
        return _step(last) if last is not None and last[0] == self.step else None

    def requests_by_pool_index(self) -> dict[int, str]:
        """Row of ``req_to_token`` -> rid, for the requests of the running batch."""
        return self._rids

    def pools(self) -> tuple[Pool, ...]:
        """Sizes and use of the target's KV pools, as the allocator knows them on the host."""
        sizes = pool_sizes(self.scheduler)
        if not sizes:
            return ()
        page = int(self.scheduler.token_to_kv_pool_allocator.page_size)
        return tuple(_pool(name, tokens, available, page) for name, tokens, available in sizes)


def pool_sizes(scheduler: Any) -> tuple[tuple[str, int, int], ...]:
    """(name, tokens, available tokens) of each pool, the full one first. Read in each step."""
    allocator = getattr(scheduler, "token_to_kv_pool_allocator", None)
    if allocator is None:
        return ()
    if hasattr(allocator, "full_available_size"):
        return (
            ("full", int(allocator.size_full), int(allocator.full_available_size())),
            ("swa", int(allocator.size_swa), int(allocator.swa_available_size())),
        )
    return (("full", int(allocator.size), int(allocator.available_size())),)


def ranks(scheduler: Any) -> Ranks:
    """The ranks of a scheduler that may be half built, or None.

    Until 0.5.14 they are attributes of the scheduler, later of its ``ps``. In 0.5.23 its module
    asks ``get_parallel()`` for them. With DP attention the dp rank is the attention group's.
    Without data parallelism SGLang gives no dp rank: it is 0 then.
    """
    if scheduler is None:
        return Ranks()
    sources = [scheduler, getattr(scheduler, "ps", None), _context(scheduler)]

    def known(*names: str) -> int:
        for source, name in itertools.product(sources, names):
            value = getattr(source, name, None)
            if isinstance(value, int):
                return value
        return -1

    dp = known("dp_rank", "attn_dp_rank")
    if dp < 0 and server_argument(getattr(scheduler, "server_args", None), "dp_size") == 1:
        dp = 0
    return Ranks(dp, known("tp_rank"), known("pp_rank"))


def _context(scheduler: Any) -> Any:
    """The object with the ranks in 0.5.23; None in other releases, and before it is made."""
    ask = getattr(sys.modules.get(type(scheduler).__module__), "get_parallel", None)
    try:
        context = ask() if callable(ask) else None
        return context if hasattr(context, "tp_rank") else None
    except Exception:
        # It is set up while the scheduler starts. A rank that is not known is said to be so.
        return None


def _pool(name: str, tokens: int, available: int, page_size: int) -> Pool:
    # A pool of N tokens has N / page_size allocatable pages and the reserved page 0.
    return Pool(name, tokens // page_size + 1, page_size, tokens, tokens - available)


def _evicted(reqs: Sequence[Any]) -> list[int | None]:
    """How many tokens' SWA pages each request has given back, None if one does not say it."""
    try:
        return [*req_kv.evicted_column(reqs)]
    except AttributeError:
        return [None]


def _step(kept: tuple[Any, ...]) -> Step:
    """A Step from the kept fields of one step, see :meth:`Recorder.record`."""
    step, mode, rids, lengths, spec, used, at, waiting, rows, committed, allocated, evicted = kept
    full, swa = (*used, -1, -1)[:2]
    return Step(
        step=step,
        forward_mode=mode,
        rids=tuple(rids),
        seq_lens=tuple(lengths),
        spec_info=spec,
        full_used=full,
        swa_used=swa,
        time_ns=at,
        waiting=waiting,
        rows=tuple(rows),
        # () if the requests of this SGLang do not have it.
        committed=() if None in committed else tuple(committed),
        allocated=tuple(0 if n is None else n for n in allocated),
        evicted=() if None in evicted else tuple(map(int, evicted)),
    )
