"""Makes a list shorter until nothing of it can be left out any more (Zeller's ddmin)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Test = Callable[[Sequence[int]], bool]  # whether what is looked for comes with this part of a list


def last(items: Sequence[int], test: Test) -> Sequence[int]:
    """The last ones, if they are enough: most faults began only shortly before the finding."""
    count = 1
    while count < len(items):
        if test(items[-count:]):
            return items[-count:]
        count *= 2
    return items


def shortest(items: Sequence[int], test: Test) -> Sequence[int]:
    """A part of ``items`` that passes, and does not without any one of them."""
    parts = 2
    while len(items) >= 2:
        size = max(1, len(items) // parts)
        rests = [[*items[:at], *items[at + size :]] for at in range(0, len(items), size)]
        for rest in rests:
            if rest and test(rest):
                items, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(items):
                break
            parts = min(len(items), 2 * parts)
    return items
