"""A token that a request was given stays in its answer as it is.

The answer is a list on the host, ``output_ids``, and a step only adds to its end. What was added
before is read when the request ends or is retracted: the prefix cache makes its key of it, a
retracted request is computed from it again, and an answer that is not streamed is made of it. So it
is compared there, with a copy. The tokens of the last result are the checks' that follow a step.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle import handed_on as h
from g4debug.tracers.spec_lifecycle.check import Violation
from g4debug.tracers.spec_lifecycle.check_values import SAMPLED
from g4debug.tracers.spec_lifecycle.log import SpecLog

SITE = "cache.release"
ENDS = (h.KEPT.end, "the request's end or retraction")


class Answers:
    """judges: whether this server's requests are followed."""

    def __init__(self, context: Context, log: SpecLog, judges: Callable[[], bool]) -> None:
        self.context = context
        self.log = log
        self._judges = judges
        # By id() of the request, as long as it lives: this is done for each request of each step.
        self._given: dict[int, array[int]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def install(self) -> None:
        self.context.after("scheduler.process_result", self.after_process)
        self.context.before(SITE, self.before_release)

    def after_process(
        self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._judges():
            given = self._given
            for request in batch.reqs or ():
                output = request.output_ids
                known = given.get(id(request))
                if known is None:
                    known = self._begin(request)
                if len(output) > len(known):
                    known.extend(output[len(known) :])
        return result

    def _begin(self, request: Any) -> array[int]:
        key, made = id(request), array("q")
        self._given[key] = made
        self._alive[key] = weakref.ref(request, lambda _: self._forget(key))
        return made

    def _forget(self, key: int) -> array[int] | None:
        self._alive.pop(key, None)
        return self._given.pop(key, None)

    def before_release(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """SGLang may begin the answer anew behind this, so it is followed anew."""
        known = self._forget(id(request))
        if known is None or not self._judges() or getattr(request, "beam_group", None):
            return
        found = check(known, request.output_ids)
        if found is not None:
            step = self.context.recorder.event_step
            self.log.judge(SITE, None, found, [str(request.rid)], step=step)


def check(known: array[int], output: Sequence[int]) -> Violation | None:
    """The first token that is another one. How many there are is other checks'."""
    both = min(len(known), len(output))
    have = array("q", output[:both])
    if have == known[:both]:
        return None
    at = next(n for n in range(both) if have[n] != known[n])
    return Violation(
        SAMPLED,
        f"output_ids as of {ENDS[0]}",
        f"output_ids is another token at {ENDS[1]}, token {at} of {len(output)}",
        0,
        h.OUTPUT.name,
        ends=ENDS,
    )
