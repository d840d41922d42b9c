"""One part of a comparison of two dumps, and how lists and mappings become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """One difference; None: that dump has no such thing."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Part:
    """One part of the dumps.

    same: how many of its values are equal; note: one line, or ''; newest_last: its changes
    are a history, so the last ones say most.
    """

    name: str
    changes: tuple[Change, ...]
    same: int
    note: str = ""
    newest_last: bool = False


def mappings(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Part:
    """Keys whose values differ, and those that one of them has alone."""
    changes = []
    for key in dict.fromkeys((*a, *b)):
        left = str(a[key]) if key in a else None
        right = str(b[key]) if key in b else None
        if left != right:
            changes.append(Change(key, left, right))
    return Part(name, tuple(changes), len(a.keys() | b.keys()) - len(changes))


def several(
    name: str,
    a: Sequence[Any],
    b: Sequence[Any],
    text: Callable[[Any], str],
    newest_last: bool = False,
) -> Part:
    """Items only in one of two lists, in their order; equal ones are counted."""
    left, right = Counter(map(text, a)), Counter(map(text, b))
    only_a = [Change("only in A", t, None) for t in (left - right).elements()]
    only_b = [Change("only in B", None, t) for t in (right - left).elements()]
    same = sum((left & right).values())
    return Part(name, (*only_a, *only_b), same, newest_last=newest_last)
