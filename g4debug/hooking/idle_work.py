"""Work on an idle server, in slices: a request that arrives waits for one slice at most.

SGLang calls ``on_idle`` again and again while there is nothing to do. Each call goes on with the
work for ``SLICE`` seconds. If anything has changed since it began, it begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

SLICE = 0.0005  # seconds
State = tuple[int, ...]  # what must not change while the work goes on
_T = TypeVar("_T")


class IdleWork(Generic[_T]):
    """One piece of work. It yields often, and returns what came of it.

    work: what goes on, None between two pieces. done: the state in which the last one ended.
    """

    def __init__(self, begin: Callable[[], Generator[None, None, _T]]) -> None:
        self._begin = begin
        self._state: State = ()
        self.work: Generator[None, None, _T] | None = None
        self.done: State = ()

    def go_on(self, state: State, whole: bool = False) -> _T | None:
        """Go on for one slice, or with ``whole`` to the end. Its result if it has ended now."""
        if self.work is None or self._state != state:
            self._state, self.work = state, self._begin()
        until = float("inf") if whole else time.monotonic() + SLICE
        try:
            next(self.work)
            while time.monotonic() < until:
                next(self.work)
        except StopIteration as end:
            self.work, self.done = None, state
            result: _T = end.value
            return result
        return None
