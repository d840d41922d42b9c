"""Puts a NaN into a live KV page, as a broken kernel or bad memory would.

The NaN is one element of one token's K or V, in a complete page that the next decode step reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from g4debug.faults._kv import SPOILS, spoil
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action

if TYPE_CHECKING:
    import torch


def poison(row: torch.Tensor, injection: Injection, action: Action) -> str:
    """Set one element of ``row``, [heads, dim], to NaN."""
    element = injection.random.randrange(row.numel())
    row.view(-1)[element] = float("nan")
    return f"NaN at element {element}"


def install(injection: Injection) -> None:
    spoil(injection, poison)


FAULT = Fault(
    id="kv-nan",
    title="an element of a live KV page becomes NaN",
    tasks=SPOILS,
    caught_by=("kv-integrity",),
    drills=("1*full", "1*swa"),
)
