"""A request's row of ``req_to_token``, and its lengths in it, are SGLang's to change.

They are numbers on the host. A request is given its row when its first batch is prepared, and loses
it with its release; ``kv_allocated_len`` grows where a batch is prepared, and ``kv_committed_len``
there and where a result is processed. In between they stay as they are. What reads them, frees by
them, or compares something with them, is right only if they are. So they are looked at first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from g4debug.hooking import req_kv
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.check import Violation
from g4debug.tracers.spec_lifecycle.future_rows import goes_on
from g4debug.tracers.spec_lifecycle.log import SpecLog

NAMES = (req_kv.ROW, req_kv.ALLOCATED, req_kv.COMMITTED)
SINCE = "it was counted last"
NOT_FOLLOWED = (
    "a request's own row and lengths are not followed any more",
    "one of SGLang's functions that may change them began and was not seen to end, or the other "
    "way round, as when a hook here has failed",
)


class Book(NamedTuple):
    """What a request was left with. retractions: how often it had been retracted by then."""

    row: int
    allocated: int
    committed: int
    retractions: int


class RequestBooks:
    """judges: whether this server's requests are followed."""

    def __init__(self, context: Context, log: SpecLog, judges: Callable[[], bool]) -> None:
        self.context = context
        self.log = log
        self._judges = judges
        self._known: weakref.WeakKeyDictionary[Any, Book] = weakref.WeakKeyDictionary()
        self._holds: dict[int, weakref.ref[Any]] = {}  # row -> the last request that was given it
        self._told: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        # What was told of a request's evicted tokens, which nobody follows.
        self._negative: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The requests that were found in order last, by id(), and their numbers: a step asks
        # several times, and nearly always nothing has changed.
        self._right: list[list[int]] = []
        # Functions of SGLang's that may change the numbers and have begun. If one side of a pair
        # of hooks is off or was skipped, this is never 0 again: what is known is old, and accuses
        # nobody.
        self._changing = 0

    def install(self) -> None:
        before, after = self.context.before, self.context.after
        before("batch.prepare_for_extend", self.before_extend)
        after("batch.prepare_for_extend", self.after_prepare)
        before("batch.prepare_for_decode", self.before_decode)
        after("batch.prepare_for_decode", self.after_prepare)
        before("scheduler.process_result", self.before_process)
        after("scheduler.process_result", self.after_process)
        before("cache.release", self.before_release)

    def row(self, request: Any, otherwise: int) -> int:
        """The row that the request was left with; ``otherwise`` if that is not known."""
        known = self._known.get(request)
        if known is None or known.row < 0 or known.retractions != _retractions(request):
            return otherwise
        return known.row

    def before_extend(self, *args: Any, **kwargs: Any) -> None:
        self._changing += 1

    def after_prepare(self, result: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang has given each request of a batch its row and its room."""
        if self._judges():
            requests = [r for r in batch.reqs or () if not _is_shared(r)]
            columns = [req_kv.column(requests, name) for name in NAMES]
            found = None
            for i, (request, row, length, committed) in enumerate(
                zip(requests, *columns, strict=True)
            ):
                found = found or self._held_by_another(i, request, row)
                self._known[request] = Book(row, length, committed, _retractions(request))
                self._holds[row] = weakref.ref(request)
            self._right = []
            if found is not None:
                self._judge("batch.prepare_for_extend", requests, found)
        self._changing -= 1
        return result

    def _held_by_another(self, i: int, request: Any, row: int) -> Violation | None:
        """Two requests that both live have one row. A release would have made us forget it."""
        ref = self._holds.get(row)
        other: Any = None if ref is None else ref()
        if row < 0 or other is None or other is request or not goes_on(other):
            return None
        known = self._known.get(other)
        if known is None or known.row != row:
            return None
        if req_kv.row(other) != row or known.retractions != _retractions(other):
            return None
        got = f"req_pool_idx = {row}, which request {other.rid} has, too"
        return Violation(
            "bookkeeping", "req_pool_idx = a row of its own", got, i, req_kv.ROW, whose=other.rid
        )

    def before_decode(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        self.judge("batch.prepare_for_decode", batch.reqs or ())
        self._changing += 1

    def before_process(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        site = "scheduler.process_result"
        self.judge(site, batch.reqs or ())
        if batch.forward_mode.is_extend():  # its requests go into the prefix cache now
            self._judge_evicted(site, batch.reqs or ())
        self._changing += 1

    def after_process(
        self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A result may commit tokens, which others check. The rest it leaves alone."""
        requests = batch.reqs or () if self._judges() else ()
        for request, now in zip(requests, req_kv.column(requests, req_kv.COMMITTED), strict=True):
            known = self._known.get(request)
            if known is not None and known.committed != now:
                self._known[request] = known._replace(committed=now)
                self._right = []
        self._changing -= 1
        return result

    def before_release(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._judge_evicted("cache.release", [request])
        self._known.pop(request, None)

    def _judge_evicted(self, site: str, requests: Sequence[Any]) -> None:
        """Up to which token SWA pages are given back is never negative, whoever set it.

        The prefix cache in Rust would end the server: "can't convert negative int to unsigned".
        """
        if not self._judges():
            return
        for i, request in enumerate(requests):
            now = req_kv.least_evicted(request)
            if now < 0 and now != self._negative.get(request):
                self._negative[request] = now
                name = req_kv.EVICTED
                want, got = f"{name} = 0 or more", f"{name} = {now}"
                found = Violation("bookkeeping", want, got, i, name, now, ends=(SINCE, ""))
                return self._judge(site, requests, found)

    def judge(self, site: str, requests: Sequence[Any]) -> None:
        """The requests of a batch have what they were left with."""
        if not self._judges():
            return
        if self._changing:
            self.context.limit(*NOT_FOLLOWED)
            return
        found = self.check(requests)
        if found is not None:
            self._judge(site, requests, found)

    def _judge(self, site: str, requests: Sequence[Any], found: Violation) -> None:
        step = self.context.recorder.event_step
        self.log.judge(site, None, found, [str(r.rid) for r in requests], step=step)

    def check(self, requests: Sequence[Any]) -> Violation | None:
        """The first request that has something else. It is told once."""
        columns = [req_kv.column(requests, name) for name in NAMES]
        these = [list(map(id, requests)), *columns]
        if these == self._right:
            return None
        for i, (request, now) in enumerate(zip(requests, zip(*columns, strict=True), strict=True)):
            known = self._known.get(request)
            if known is None or known[:-1] == now or self._told.get(request) == now:
                continue
            if not goes_on(request) or known.retractions != _retractions(request):
                continue  # it has ended, or was given another row since
            if now[0] < 0 and now[1] != known.allocated:
                continue  # its KV was given back where nobody saw it
            self._told[request] = now
            name, want, got = next(x for x in zip(NAMES, known, now, strict=False) if x[1] != x[2])
            words = f"{name} = {got} ({got - want:+d})"
            return Violation(
                "bookkeeping", f"{name} = {want}", words, i, name, got - want, ends=(SINCE, "")
            )
        self._right = these
        return None


def _retractions(request: Any) -> int:
    return int(getattr(request, "retraction_count", 0) or 0)


def _is_shared(request: Any) -> bool:
    """A session's requests, and the beams of one, hand their rows on to each other."""
    return getattr(request, "session", None) is not None or bool(
        getattr(request, "beam_group", None)
    )
