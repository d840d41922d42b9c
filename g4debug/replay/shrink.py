"""Makes a workload smaller, as long as the finding still comes.

First events are left out. Then an event comes after another one and no longer in an exact round,
and each verify may accept few tokens or many. Then pages are left out, ends of prompts, and tokens
of answers. What one stage does may let another one do more, so all go on until none can.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from g4debug.findings.record import TrapRecord
from g4debug.findings.tape import Abort, How, Recording, Request
from g4debug.replay.ddmin import last, shortest
from g4debug.replay.setting import CannotReplay
from g4debug.replay.workload import After, Workload, pages_of

INTERRUPTED = "stopped by Ctrl-C"
NEAREST = 3  # requests that are tried as the one after which another one comes


@dataclass(frozen=True)
class Shown:
    """The finding came. reached: see ``Outcome``. record: the finding's dump."""

    reached: Sequence[Mapping[int, int]]
    record: TrapRecord | None = None


@dataclass
class Shrinking:
    """try_it: how the finding comes with a workload, None if it does not come.

    until: of the monotonic clock; then no more are tried. told: is told how many were tried and how
    many requests are left. best, shown: the smallest that passed up to now, None if none has, and
    how the finding came. trail: the same after each stage. whole: nothing is left to try. why: it
    ended before, in words.
    """

    recording: Recording
    try_it: Callable[[Workload], Shown | None]
    until: float
    told: Callable[[int, int], None] = lambda tried, left: None
    drafts: int = 1
    best: Workload | None = None
    shown: Shown = Shown(())
    trail: list[tuple[Workload, Shown]] = field(default_factory=list)
    tried: int = 0
    whole: bool = False
    why: str = ""
    _known: dict[str, bool] = field(default_factory=dict)

    def run(self) -> Workload | None:
        try:
            if self.passes(Workload.whole(self.recording)):
                self._all_stages()
                self.whole = True
        except Over:
            self.why = "there was no time to try all"
        except KeyboardInterrupt:
            self.why = INTERRUPTED
        except CannotReplay as e:
            self.why = str(e)
        return self.best

    def _all_stages(self) -> None:
        last(self.now.keep, lambda keep: self.changed(keep=tuple(keep)))
        before = None
        while self.best != before:
            before = self.best
            for stage in (
                self._events,
                self._arrivals,  # while prompts and answers are not yet cut to fit into rounds
                self._accepted,
                self._pages,
                self._rests,
                self._answers,
            ):
                stage()
                if self.now not in [workload for workload, _ in self.trail]:
                    self.trail.append((self.now, self.shown))

    @property
    def now(self) -> Workload:
        assert self.best is not None
        return self.best

    @property
    def requests(self) -> list[tuple[int, Request]]:
        """The requests of the best workload, each with its index."""
        return list(self.now.requests(self.recording))

    def changed(self, **changes: Any) -> bool:
        """Try the best workload with these changes."""
        return self.passes(dataclasses.replace(self.now, **changes))

    def passes(self, workload: Workload) -> bool:
        """Each is tried once, in all its ways. Raises Over if there is no time left."""
        key = json.dumps(workload.plain())
        if key not in self._known:
            self._known[key] = self._try(workload)
        return self._known[key]

    def _try(self, workload: Workload) -> bool:
        if not any(isinstance(self.recording.given[i], Request) for i in workload.keep):
            return False
        found = []
        for way in workload.ways():
            if time.monotonic() >= self.until:
                raise Over
            self.tried += 1
            shown = self.try_it(way)
            self.told(self.tried, len(self.requests) if self.best else 0)
            if shown is None:
                return False
            found.append(shown)
        self.best, self.shown = workload, found[0]
        return True

    # --- the stages ------------------------------------------------------------------------------

    def _events(self) -> None:
        shortest(self.now.keep, lambda keep: self.changed(keep=tuple(keep)))

    def _accepted(self) -> None:
        """Let the finding not depend on how many tokens a verify accepts."""
        if self.drafts > 1 and not self.now.accepted:
            self.changed(accepted=(1, self.drafts))

    def _pages(self) -> None:
        """Leave out pages, each of all requests that have it."""
        cut = self.now.cut
        found = (n for _, r in self.requests for n, _ in pages_of(r, self.recording))
        pages = list(dict.fromkeys(found))

        def without(kept: Sequence[int]) -> bool:
            return self.changed(cut=cut | {h for n, h in enumerate(pages) if n not in kept})

        if pages and not without(()):
            shortest(range(len(pages)), without)

    def _rests(self) -> None:
        """Let prompts end where a page ends, or one token behind."""
        for _, request in self.requests:
            rest = request.prompt % self.recording.page
            for fewer in range(0 if request.prompt >= self.recording.page else 1, min(2, rest)):
                if self.changed(rest={**self.now.rest, request.id: fewer}):
                    break

    def _answers(self) -> None:
        """Let requests end after fewer tokens, and by nothing else."""
        for _, request in reversed(self.requests):

            def ends(tokens: int, whose: int = request.id) -> bool:
                return self.changed(longest={**self.now.longest, whose: tokens})

            recorded = request.how in (How.LENGTH, How.STOP) or request.longest < 0
            few, most = 0, max(1, request.output if recorded else request.longest)
            if request.id not in self.now.longest and not ends(most):
                continue
            middle = 1
            while few + 1 < most:  # the finding comes with most, and not with few
                few, most = (few, middle) if ends(middle) else (middle, most)
                middle = (few + most) // 2

    def _arrivals(self) -> None:
        """Let events come after other ones, so that their exact rounds do not matter."""
        if self.now.after.keys() >= set(self.now.keep):
            return
        first = {self.now.keep[0]: After(0, After.ENDED)}
        for others in (After(0, After.ENDED), After(0, After.TOGETHER)):
            if self.changed(after=dict.fromkeys(self.now.keep, others) | first):
                return
        for place, index in enumerate(self.now.keep):
            if index in self.now.after:
                continue
            for after in self._ways(place):
                if self.changed(after={**self.now.after, index: after}):
                    break

    def _ways(self, place: int) -> Iterator[After]:
        """When the event at this place may come, simple ways first."""
        yield After(0, After.ENDED)
        if place:
            yield After(0, After.TOGETHER)
        event = self.recording.given[self.now.keep[place]]
        reached = self.shown.reached
        state = dict(reached[place]) if place < len(reached) else {}
        if isinstance(event, Abort) and event.whose in state:  # most likely its own request
            state[event.whose] = state.pop(event.whose)
        ended = [whose for whose, tokens in state.items() if tokens == After.ENDED]
        running = [(whose, tokens) for whose, tokens in state.items() if tokens > 0]
        for whose in ended[: -NEAREST - 1 : -1]:
            yield After(whose, After.ENDED)
        for whose, tokens in running[: -NEAREST - 1 : -1]:
            for n in dict.fromkeys((1, tokens)):
                yield After(whose, n)


class Over(Exception):
    """There is no time left."""
