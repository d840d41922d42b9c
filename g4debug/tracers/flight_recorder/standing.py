"""Tells by itself that the server stands, or that a request starves, and why.

It looks once in a second at most, in the scheduler's own loop, and less often where a look takes
long. The finding is logged and dumped once, and stops no server, in no mode. A loop that stands
itself (in a kernel that does not end, or that compiles for minutes) is not told here, but by
:mod:`g4debug.tracers.flight_recorder.stuck`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import reasons, report, work
from g4debug.tracers.flight_recorder.outside_waits import OutsideWaits
from g4debug.tracers.flight_recorder.pause import Pause
from g4debug.tracers.flight_recorder.progress import ROUND, Progress
from g4debug.tracers.flight_recorder.reasons import Reason
from g4debug.tracers.flight_recorder.waits import Urgency, Wait, Waits
from g4debug.tracers.flight_recorder.work import Place, Work

LIVE = 3.0  # seconds; who has waited for so long is shown by doctor
OLD = 2.0  # seconds; what doctor shows says its age if it is older
SHOWN = 8  # requests that doctor shows
NAMED = 4  # requests whose reasons are in a finding
SHARE = 500  # a look takes at most one part in so many of the time
QUIET = 3600.0  # seconds; the most that pass before starved requests are told again


class Standing:
    """long: a request that was overtaken and gets nowhere for so many seconds starves."""

    long: ClassVar[float] = 600.0

    def __init__(self, context: Context, progress: Progress) -> None:
        self.context, self.progress = context, progress
        self.recorder, self.settings = context.recorder, context.settings
        self.waits = Waits()
        self.pause, self.outside = Pause(self._leads), OutsideWaits(self._leads)
        self.stands = False  # that was told, and no step was made since
        self._due = 0.0
        self._quiet = 0.0  # how long no starved request is told after this one
        self._quiet_until = 0.0  # in the time in which the loop turns
        self._shown: list[str] = []  # by doctor, made at ``_shown_at``, anew at ``_show_at``
        self._shown_at = self._show_at = 0.0

    def look(self) -> None:
        """Called in each round of the event loop, after ``progress``."""
        if time.monotonic() < self._due:
            return
        began = time.thread_time()  # a machine that is busy with others makes no look dearer
        self.stands = self.stands and self._seconds() >= self.settings.hang_seconds
        self.pause.look(self.recorder.scheduler, self.progress.loop)
        items = work.of(self.recorder.scheduler)
        if items:
            self._look_at(items)
            self._judge(items)
        else:
            self.waits.forget()
        self.outside.look(self.waits.all.values(), self.progress.loop)
        self._due = time.monotonic() + max(ROUND, SHARE * (time.thread_time() - began))

    def live(self) -> tuple[str, list[str]]:
        """That the server stands, '' if not; and who waits, since when and why."""
        scheduler = self.recorder.scheduler
        if scheduler is not None and work.paused(scheduler):
            return "", [self.pause.line(scheduler, self.progress.loop)]
        stands = ""
        if self.stands:
            stands = f"it stands: no step for {self._seconds():.0f} s, although requests wait"
        now = time.monotonic()
        if now >= self._show_at:
            began = time.thread_time()
            self._shown, self._shown_at = self._waiting(scheduler), now
            self._show_at = now + SHARE * (time.thread_time() - began)
        age = now - self._shown_at
        old = [f"this is as of {age:.0f} s ago"] if self._shown and age >= OLD else []
        return stands, self.outside.lines + self._shown + old

    def _waiting(self, scheduler: Any) -> list[str]:
        items = work.of(scheduler)
        self._look_at(items)
        some = [w for w in self.waits.all.values() if self._waited(w) >= LIVE]
        steps = self._seconds() < LIVE
        told = []
        for wait in some[:SHOWN]:
            reason = reasons.of(scheduler, Work(wait.request, wait.place), items, steps)
            verb = "waits" if wait.place not in (Place.RUNS,) else "runs without progress for"
            policy = f"; {_policy(scheduler)}" if _by_policy(wait) else ""
            line = f"request {wait.name} {verb} {self._waited(wait):.0f} s: {reason.line}{policy}"
            told.append(line)
        if len(some) > SHOWN:
            told.append(f"{len(some) - SHOWN} more requests wait")
        return told

    def _look_at(self, items: list[Work]) -> None:
        scheduler = self.recorder.scheduler
        between = work.between(scheduler, items)
        self.waits.look(items, self.progress.loop, self._steps, _urgency(scheduler), between)

    def _judge(self, items: list[Work]) -> None:
        limit = self.settings.hang_seconds
        late = [
            w for w in self.waits.all.values() if not w.place.outside and self._waited(w) >= limit
        ]
        if self._seconds() >= limit:
            if late and not self.stands:
                self.stands = True
                if not self._leads():
                    return
                hang = self.progress.turning(self._seconds())
                finding = report.of_standing(
                    hang, list(self._reasons(late, items, False)), self.context
                )
                self.context.trap.tell(finding, each=True)
            return
        starved = [w for w in late if self._starves(w)]
        if not starved:
            starved = self._never_fits(late, items)
        if any(not w.told for w in starved) and self.progress.loop >= self._quiet_until:
            self._tell_starved(starved, items)

    def _tell_starved(self, starved: list[Wait], items: list[Work]) -> None:
        """Each time the next one is told later, so that a server that goes on floods no log."""
        self._quiet = min(QUIET, max(self.settings.hang_seconds, 2 * self._quiet))
        self._quiet_until = self.progress.loop + self._quiet
        for wait in starved:
            wait.told = True
        if not self._leads():
            return
        starved.sort(key=lambda w: w.step)
        finding = report.of_starved(
            self._steps - starved[0].step,
            self._waited(starved[0]),
            list(self._reasons(starved, items, True)),
            self.context,
        )
        self.context.trap.tell(finding, each=True)

    def _leads(self) -> bool:
        """False if another tensor-parallel rank tells the same: one finding is enough."""
        return self.context.trap.others.leads()

    def _never_fits(self, late: list[Wait], items: list[Work]) -> list[Wait]:
        """The first of the queue, if its pool is too small for it and so it can never be admitted.

        Nobody overtakes it, because SGLang stops at the first one that does not fit: all others
        wait behind it until the last running request ends, and for ever then. It is asked once in
        ``hang_seconds``.
        """
        queue = getattr(self.recorder.scheduler, "waiting_queue", None) or (None,)
        for wait in late:
            if wait.request is not queue[0] or wait.place is not Place.QUEUE:
                continue
            if wait.told or self.progress.loop < wait.asked + self.settings.hang_seconds:
                return []
            wait.asked = self.progress.loop
            item = Work(wait.request, wait.place)
            return [wait] if reasons.of(self.recorder.scheduler, item, items, True).never else []
        return []

    def _starves(self, wait: Wait) -> bool:
        """No progress for so many steps, without those in which it waited for its turn.

        Or for ``long`` since it was overtaken: where there is little to do, so many steps take
        hours. A request in a long queue that nobody overtakes does not starve, nor one that only
        more urgent ones overtake (:func:`_urgency`). Who overtakes whom is not known where requests
        come from another server: they are in a queue again behind it.
        """
        most = self.settings.starved_steps
        if not most or wait.place is Place.ROOM or _by_policy(wait):
            return False
        return self._steps - wait.turn >= most or self.progress.loop - wait.passed >= self.long

    def _reasons(
        self, waits: list[Wait], items: list[Work], steps: bool
    ) -> Iterator[tuple[Wait, float, Reason | None]]:
        for n, wait in enumerate(waits):
            of = None
            if n < NAMED:
                item = Work(wait.request, wait.place)
                of = reasons.of(self.recorder.scheduler, item, items, steps)
            yield wait, self._waited(wait), of

    @property
    def _steps(self) -> int:
        """Steps so far: of requests, see ``Progress``."""
        return self.recorder.step - self.progress.empty

    def _seconds(self) -> float:
        """For how long the loop has turned without a step."""
        return self.progress.loop - self.progress.step_loop

    def _waited(self, wait: Wait) -> float:
        return self.progress.loop - (wait.since if wait.place.outside else wait.loop)


def _by_policy(wait: Wait) -> bool:
    """True if only requests of a higher priority, or of longer answers, have overtaken it."""
    return wait.overtaken and wait.passed == math.inf


def _policy(scheduler: Any) -> str:
    more = ["of a higher priority"] * _has_priorities(scheduler)
    more += ["of longer answers"] * _longest_first(scheduler)
    return f"only requests {' or '.join(more)} have overtaken it, as the server's policy wants"


def _has_priorities(scheduler: Any) -> bool:
    return bool(getattr(scheduler, "enable_priority_scheduling", False))


def _longest_first(scheduler: Any) -> bool:
    """The policy ``lof``: who may give the longest answer is the next one."""
    return getattr(scheduler, "schedule_policy", "") == "lof"


def _urgency(scheduler: Any) -> Callable[[Any], Urgency]:
    """Of a request: its priority where SGLang has priorities, and then, with ``lof``, the longest
    answer that it may give. How other policies sort a queue has another purpose: who is overtaken
    there for ever, starves.
    """
    priorities, lof = _has_priorities(scheduler), _longest_first(scheduler)
    sign = -1 if getattr(scheduler, "schedule_low_priority_values_first", False) else 1

    def urgency(request: Any) -> Urgency:
        longest = getattr(getattr(request, "sampling_params", None), "max_new_tokens", None)
        return (
            sign * float(getattr(request, "priority", None) or 0) if priorities else 0.0,
            float(longest or 0) if lof else 0.0,
        )

    return urgency
