"""The truth for the tables of a forward, as it was when the forward was launched.

With overlap scheduling the host is ahead of the device. While a forward runs, the scheduler frees
the pages of requests that have ended, gives their rows to others, and allocates for the next batch.
So SGLang's live tables say what will be true next, and not what is true for this forward. This
module copies everything that the guard compares with, on the stream of the forward and before its
first kernel, and makes SGLang's scheduling stream wait for the copy:

    scheduling stream:  ... allocate N, write its rows | (wait for copy N) | free, allocate N+1 ...
    forward stream:     (wait for the scheduling stream) | copy N | tables N, attention N ...

The copy is static, so that a captured CUDA graph compares with it, too: the forward that is
replayed is always the one whose copy was made last on that stream.

The second wait that is needed is SGLang's own: its tables are built from its live rows, and must
be built before these change. From 0.5.18 on SGLang waits for that right after the launch. Releases
before wait for it later, after they have processed the last result. There this calls SGLang's own
barrier right after the launch, where it is needed (:mod:`g4debug.hooking.table_barrier`). So while
a tracer that compares with the copy is armed, that bug of SGLang's cannot happen; without one, the
fix ``result-fence`` prevents it. The idea of a snapshot, instead of a lock, comes from
read-copy-update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from g4debug.hooking import req_kv
from g4debug.hooking.table_barrier import wait_for_tables
from g4debug.sanitizer.snapshot_copy import Copy

if TYPE_CHECKING:
    from g4debug.findings.steps import Recorder
    from g4debug.ledger.ledger import Ledger

IN_FLIGHT = 8  # forwards that are remembered; SGLang has two in flight at most


@dataclass
class Snapshot:
    """The requests of one forward that may still be in flight.

    number: SGLang's own number of the forward, -1 if it has none yet. requests: row of
    ``req_to_token`` -> its request. void: the rows of requests that had left before the result was
    processed; None until it is processed.
    """

    number: int
    requests: dict[int, Any]
    void: set[int] | None = None


class ForwardSnapshots:
    """Makes the copy of each forward in time, and remembers who was in the last forwards.

    Several tracers may share one (:func:`shared`). Then each of them calls it at the same sites,
    and only the first call does the work.

    running: ``Scheduler.run_batch`` is on its way. What runs outside of it serves no request.
    """

    def __init__(self) -> None:
        self.copy: Copy | None = None
        self.step = -1  # of the copy that was made last
        self.running = False
        self._due = False  # run_batch has begun, and the copy of its forward is not made yet
        self._event: Any = None
        self._taken: dict[int, Snapshot] = {}  # by step

    def prepare(self, req_to_token: torch.Tensor, page_size: int, ledger: Ledger | None) -> None:
        """Make room for the copies. Call it before a CUDA graph is captured.

        req_to_token: int32 [rows, tokens], the one that the forwards read.
        """
        if self.copy is None or self.copy.source is not req_to_token:
            self.copy = Copy(req_to_token, page_size, ledger)

    def begin(self) -> None:
        """``Scheduler.run_batch`` is about to run."""
        self.running = True
        self._due = self.copy is not None

    def take(self, batch: Any, step: int) -> None:
        """The first forward of a ``ScheduleBatch`` is about to begin, on the current stream."""
        if not self._due or self.copy is None:
            return
        self._due = False
        rows = batch.req_pool_indices
        if rows is None or not rows.numel():
            return
        self.copy.make(rows, step)
        self.step = step
        if rows.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        requests = dict(zip(req_kv.column(batch.reqs, req_kv.ROW), batch.reqs, strict=True))
        # 0.5.12's batch for a worker has no number yet; see `returned`.
        self._taken[step] = Snapshot(getattr(batch, "forward_iter", -1), requests)
        while len(self._taken) > IN_FLIGHT:
            del self._taken[next(iter(self._taken))]

    def returned(self, scheduler: Any) -> None:
        """``run_batch`` has returned: let the scheduling stream wait for the forward's reads."""
        self._due = self.running = False
        last = self._taken.get(self.step)
        if last is not None and last.number < 0:
            last.number = scheduler.forward_ct
        if self._event is None:
            return
        torch.cuda.current_stream().wait_event(self._event)
        self._event = None
        wait_for_tables(scheduler)

    def processing(self, batch: Any) -> None:
        """The result of this batch is about to be processed: see :meth:`is_void`."""
        number = getattr(batch, "forward_iter", None)
        for taken in self._taken.values():
            if taken.number == number and taken.void is None:
                requests = taken.requests.items()
                taken.void = {row for row, request in requests if _gone(request, row)}

    def request(self, step: int, row: int) -> Any:
        """The request that had this row of ``req_to_token`` in the forward of a step, or None."""
        taken = self._taken.get(step)
        return None if taken is None else taken.requests.get(row)

    def is_void(self, step: int, row: int) -> bool:
        """True if the request of this row had left before that forward's result was processed.

        It ended in an earlier forward, or was retracted. SGLang may have given its pages and its
        row to others while this forward ran, and throws away what the forward computed for it.
        """
        request = self.request(step, row)
        if request is None:
            return True  # so long ago, or never there: the row's request is not known
        void = self._taken[step].void
        return row in void if void is not None else _gone(request, row)


_shared: WeakKeyDictionary[Recorder, ForwardSnapshots] = WeakKeyDictionary()


def shared(recorder: Recorder) -> ForwardSnapshots:
    """The process's only instance, so that a forward is copied once for all tracers.

    recorder: the step recorder of the process.
    """
    if recorder not in _shared:
        _shared[recorder] = ForwardSnapshots()
    return _shared[recorder]


def _gone(request: Any, row: int) -> bool:
    return bool(request.finished()) or req_kv.row(request) != row
