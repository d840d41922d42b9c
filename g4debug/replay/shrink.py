"""Makes the requests fewer until the finding would not come any more (Zeller's ddmin)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Search:
    """Tries subsets of a list, each at most once. best: the smallest that passed up to now.

    test: whether the finding comes with a subset. until: of the monotonic clock; then no more are
    tried. told: is told how many were tried and how many are left.
    """

    test: Callable[[tuple[int, ...]], bool]
    until: float
    told: Callable[[int, int], None] = lambda tried, left: None
    best: tuple[int, ...] = ()
    tried: dict[tuple[int, ...], bool] = field(default_factory=dict)
    interrupted: bool = False  # the time was over, or somebody pressed Ctrl-C

    def passes(self, items: Sequence[int]) -> bool:
        """Raises Over if there is no time left."""
        subset = tuple(items)
        if subset not in self.tried:
            if time.monotonic() >= self.until:
                raise Over
            self.tried[subset] = self.test(subset)
            if self.tried[subset] and (not self.best or len(subset) < len(self.best)):
                self.best = subset
            self.told(len(self.tried), len(self.best))
        return self.tried[subset]

    def run(self, items: Sequence[int]) -> tuple[int, ...]:
        """The smallest list that was found; () if not even all of them pass."""
        try:
            if self.passes(items):
                self._minimise(self._last(items))
        except (Over, KeyboardInterrupt):
            self.interrupted = True
        return self.best

    def _last(self, items: Sequence[int]) -> Sequence[int]:
        """The last ones, if they are enough: most faults began only shortly before the finding."""
        count = 1
        while count < len(items):
            if self.passes(items[-count:]):
                return items[-count:]
            count *= 2
        return items

    def _minimise(self, items: Sequence[int]) -> Sequence[int]:
        parts = 2
        while len(items) >= 2:
            size = max(1, len(items) // parts)
            rests = [[*items[:at], *items[at + size :]] for at in range(0, len(items), size)]
            for rest in rests:
                if rest and self.passes(rest):
                    items, parts = rest, max(parts - 1, 2)
                    break
            else:
                if parts >= len(items):
                    break
                parts = min(len(items), 2 * parts)
        return items


class Over(Exception):
    """There is no time left."""
