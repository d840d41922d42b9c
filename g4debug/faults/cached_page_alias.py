"""Lets the prefix cache hand out another page than the one that it has for these tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from g4debug.faults import _prefix
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    import torch


def install(injection: Injection) -> None:
    import torch

    def change(slots: torch.Tensor, size: int) -> torch.Tensor:
        if len(slots) < 2 * size or (action := injection.fire()) is None:
            return slots
        pages = slots[: len(slots) // size * size].reshape(-1, size)
        changed = pages.flip(0) if action.task == "reverse" else pages.roll(1, 0)
        injection.log(f"handed out {len(pages)} pages in another order")
        return torch.cat((changed.flatten(), slots[changed.numel() :]))

    _prefix.change_handed_out(injection, change)


FAULT = Fault(
    id="cached-page-alias",
    title="the prefix cache hands out its pages in another order",
    tasks={"on": "each page is the one before it", "reverse": "the last page comes first"},
    caught_by=("prefix-cache",),
    asks=("a prefix cache",),
)
