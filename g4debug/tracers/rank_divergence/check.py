"""The check: what two ranks do in the same step is the same. Pure: digests in, differences out."""

from __future__ import annotations

from dataclasses import dataclass

from g4debug.tracers.rank_divergence import digest


@dataclass(frozen=True)
class Difference:
    """One field that differs. mine, others: its values, in words."""

    name: str
    mine: str
    other: str


def compare(mine: bytes, other: bytes) -> list[Difference]:
    """The differences between two digests of one step, the most telling first.

    Raises ValueError if one of them is no digest.
    """
    if mine == other:
        return []
    fields = zip(digest.FIELDS, digest.split(mine), digest.split(other), strict=True)
    return [
        Difference(name, digest.words(name, a), digest.words(name, b))
        for name, a, b in fields
        if a != b
    ]
