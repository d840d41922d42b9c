"""Knows since when each request of the scheduler has made no progress, and who overtook it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from g4debug.hooking import req_kv
from g4debug.tracers.flight_recorder.work import Place, Work, name

BEGUN = (Place.RUNS, Place.CHUNK)
Urgency = tuple[float, float]  # of two requests, the more urgent one has the greater


@dataclass
class Wait:
    """One request. order: as the requests came into the queue. loop, step: at its last progress.

    ``loop`` is the time in which the event loop turned, in seconds. While the request waits for
    storage, it is moved on. since: ``loop`` when it came to its place. turn: ``step``, and with it
    the steps since then in which it waited for its turn in the queue. done: the most tokens that
    were computed or generated for it; a retraction takes none away. last: how many it had at the
    last look. again: how often it has lost some since it had the most. overtaken: a request that
    came later has begun since its last progress. passed: ``loop`` when one has first done so that
    is not more urgent; inf if none has. asked: ``loop`` when it was last asked if it can ever be
    admitted. told, warned: a finding or a warning was made of it.
    """

    request: Any
    place: Place
    order: int
    loop: float
    step: int
    turn: int
    since: float = 0.0
    done: int = 0
    last: int = 0
    again: int = 0
    overtaken: bool = False
    passed: float = math.inf
    asked: float = -math.inf
    told: bool = False
    warned: bool = False

    @property
    def rid(self) -> str:
        return str(getattr(self.request, "rid", ""))

    @property
    def name(self) -> str:
        """The id, as it may stand in a sentence."""
        return name(self.request)


class Waits:
    """The requests at the last look, in the order in which they came into SGLang's queue."""

    def __init__(self) -> None:
        self.all: dict[int, Wait] = {}  # by the id of the object, which each entry keeps alive
        self._between: dict[int, Wait] = {}  # of those that were between two batches
        self._count = 0
        self._step = 0  # at the last look
        self._loop = 0.0

    def forget(self) -> None:
        """Nothing is due: from now on everybody waits anew."""
        self.all, self._between = {}, {}

    def look(
        self,
        work: Iterable[Work],
        loop: float,
        step: int,
        urgency: Callable[[Any], Urgency] = lambda request: (0.0, 0.0),
        between: Iterable[Any] = (),
    ) -> None:
        """loop: the time in which the event loop has turned, in seconds. step: the last one.

        urgency: of a request by the server's policy; who has more may overtake. between: requests
        that are on their way from one batch to the next. They wait for nothing, but have not come
        anew when they are seen again.
        """
        before, self.all, self._between = self.all | self._between, {}, {}
        began: list[Wait] = []  # for the first time since the last look
        passing = {id(request): Work(request, Place.RUNS) for request in between}
        there = [w for w in work if w.request is not None]
        for request, place in sorted((*there, *passing.values()), key=_came):
            found = before.get(id(request))
            if id(request) in passing:
                if found is None:
                    found = Wait(request, place, self._next(), loop, step, step, loop)
                self._between[id(request)] = found
                continue
            if found is None:
                found = Wait(request, place, self._next(), loop, step, step, loop)
            elif found.place is Place.STORAGE and place is Place.STORAGE:
                found.loop += loop - self._loop
                found.turn += step - self._step
            elif found.place not in BEGUN and not found.overtaken:
                found.turn += step - self._step
            if found.place is not place:
                self._moved(found, place, loop, step)
            self.all[id(request)] = found
            done = _done(request) if place in BEGUN else 0
            if self._went_on(found, done):
                if not found.done:
                    began.append(found)
                found.loop, found.step, found.turn = loop, step, step
                found.overtaken = found.told = False
                found.passed = math.inf
            if done > found.done:
                found.done, found.again = done, 0
        self._step, self._loop = step, loop
        if began:
            self._overtake(began, loop, urgency)

    def _moved(self, wait: Wait, place: Place, loop: float, step: int) -> None:
        """A request has come to another place since the last look."""
        # It is in the queue already while it waits for storage.
        if wait.place.outside and not place.outside and wait.place is not Place.STORAGE:
            # It comes into the queue only now, behind the others.
            wait.order, wait.loop, wait.step, wait.turn = self._next(), loop, step, step
        elif wait.place in BEGUN and place not in BEGUN:
            wait.order = self._next()  # it was retracted, and goes behind the others
        wait.place, wait.since, wait.warned = place, loop, False

    def _overtake(self, began: list[Wait], loop: float, urgency: Callable[[Any], Urgency]) -> None:
        newest = max(w.order for w in began)
        orders = {w.order: urgency(w.request) for w in began}
        for wait in self.all.values():
            if wait.order >= newest or wait.place in BEGUN or wait.place.outside:
                continue
            wait.overtaken = True
            mine = urgency(wait.request)
            if wait.passed == math.inf and any(
                order > wait.order and other <= mine for order, other in orders.items()
            ):
                wait.passed = loop

    @staticmethod
    def _went_on(wait: Wait, done: int) -> bool:
        """A request has more tokens than ever, or is computed anew after its first retraction.

        One that is retracted again and again gets nowhere, however much of it is computed.
        """
        wait.again += done < wait.last
        more = done > wait.last
        wait.last = done
        return done > wait.done or (more and wait.again <= 1)

    def _next(self) -> int:
        self._count += 1
        return self._count


def _came(item: Work) -> float:
    """When SGLang has put a request into its queue. Its policy may sort that queue."""
    stats = getattr(item.request, "time_stats", None)
    return float(getattr(stats, "wait_queue_entry_time", 0.0)) or math.inf


def _done(request: Any) -> int:
    committed = getattr(req_kv.holder(request, req_kv.COMMITTED), req_kv.COMMITTED, None)
    return int(committed or 0) + len(getattr(request, "output_ids", ()))
