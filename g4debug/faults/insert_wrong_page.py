"""Lets a request hand wrong pages to the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from g4debug.faults import _prefix
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    import torch


def install(injection: Injection) -> None:
    def change(slots: torch.Tensor, size: int) -> torch.Tensor:
        if len(slots) < 2 * size or (action := injection.fire()) is None:
            return slots
        changed = slots.clone()
        last = slice(len(slots) // size * size - size, len(slots) // size * size)
        if action.task == "shift":
            changed[last] = slots[last].roll(1)
        else:
            changed[last] = slots[:size]
        injection.log(
            f"{action.task}: {_page(slots[last], size)} became {_page(changed[last], size)}"
        )
        return changed

    _prefix.change_handed_over(injection, change)


def _page(slots: torch.Tensor, size: int) -> str:
    return f"page {int(slots[0]) // size} from slot {int(slots[0]) % size} on"


FAULT = Fault(
    id="insert-wrong-page",
    title="a request hands a wrong page to the prefix cache",
    tasks={"on": "its first page twice", "shift": "the slots of its last page, shifted by one"},
    caught_by=("prefix-cache",),
    asks=("a prefix cache",),
)
