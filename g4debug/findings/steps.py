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
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from g4debug.findings import step_bytes
from g4debug.findings.record import Pool, Step
from g4debug.findings.status import Status
from g4debug.hooking.resolved import server_argument

_RID = attrgetter("rid")
Kept = tuple[list[str], bytes]  # the requests' ids, and the rest of a step
PoolSizes = tuple[tuple[str, int, int], ...]  # name, tokens, available tokens


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
    also: gets the ids and the bytes of each step (:mod:`g4debug.findings.step_bytes`), and when it
    began, in Unix nanoseconds.
    """

    def __init__(self, size: int) -> None:
        # They become a Step only if somebody reads them: to make one takes as long as all other
        # work here.
        self._kept: deque[Kept] = deque(maxlen=size)
        self._recorded = 0  # the step that was recorded last
        self.step = 0
        self.scheduler: Any = None
        self.preparing = False
        self.status = Status(self)
        self.also: Callable[[list[str], bytes, int], None] | None = None
        self._rids: dict[int, str] | None = {}  # None: nobody has asked since the last step
        self._pools: PoolSizes | None = None  # as ``read_pools`` has read them for the next step

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

    def read_pools(self, scheduler: Any) -> PoolSizes:
        """:func:`pool_sizes` at the beginning of a step, before it is counted.

        ``record`` takes them from here: to ask SGLang is the dearest part of both.
        """
        self._pools = sizes = pool_sizes(scheduler)
        return sizes

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
        requests, scheduler, step = batch.reqs, self.scheduler, self.step
        sizes, self._pools = self._pools, None
        if sizes is None:
            sizes = pool_sizes(scheduler)
        rids = list(map(_RID, requests))
        lengths = batch.seq_lens_cpu
        spec = getattr(batch, "spec_info", None)
        waiting = getattr(scheduler, "waiting_queue", None)
        mode, at = batch.forward_mode, time.time_ns()
        packed = step_bytes.pack(
            requests,
            lengths.tolist() if lengths is not None else (),
            step,
            [tokens - available for _, tokens, available in sizes],
            at,
            -1 if waiting is None else len(waiting),
            mode.name if mode else "",
            "" if spec is None else type(spec).__name__,
        )
        self._kept.append((rids, packed))
        self._recorded, self._rids = step, None
        if self.also is not None:
            self.also(rids, packed, at)

    @property
    def current(self) -> Step | None:
        """The step that was counted last, None if it was not recorded."""
        return _step(self._kept[-1]) if self.step == self._recorded > 0 else None

    def requests_by_pool_index(self) -> dict[int, str]:
        """Row of ``req_to_token`` -> rid, for the requests of the running batch."""
        if self._rids is None:
            step = _step(self._kept[-1])
            known = zip(step.rows, step.rids, strict=True)
            self._rids = {row: rid for row, rid in known if row >= 0}
        return self._rids

    def pools(self) -> tuple[Pool, ...]:
        """Sizes and use of the target's KV pools, as the allocator knows them on the host."""
        sizes = pool_sizes(self.scheduler)
        if not sizes:
            return ()
        page = int(self.scheduler.token_to_kv_pool_allocator.page_size)
        return tuple(_pool(name, tokens, available, page) for name, tokens, available in sizes)


def pool_sizes(scheduler: Any) -> PoolSizes:
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


def _step(kept: Kept) -> Step:
    rids, packed = kept
    found = step_bytes.unpack(packed, [str(rid) for rid in rids])
    del found["count"]
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
    return Step(**fields)
