"""Who made the hidden states that a hand-over passes on, and whether they are still the same."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from g4debug.tracers.spec_lifecycle.check import Violation


@dataclass(frozen=True)
class Mark:
    """A tensor as it was handed over: the very object, and how often it had been written."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Mark:
        return Mark(weakref.ref(tensor), _version(tensor))

    def differs(self, tensor: torch.Tensor | None) -> str:
        """'' if ``tensor`` is the one that was handed over, else what is different."""
        if tensor is None:
            return "None"
        if self.tensor() is not tensor:
            return "another tensor"
        return "" if self.version == _version(tensor) else "the same tensor, written since"


def _version(tensor: torch.Tensor) -> int:
    # Tensors of inference mode are not counted; there only another object is seen.
    return -1 if tensor.is_inference() else int(tensor._version)


class Custody:
    """Follows the hidden states from the forward that made them to the draft that reads them.

    Compares identity and torch's version counter, never values: nothing is read from a device.
    """

    def __init__(self) -> None:
        self.made: Mark | None = None  # by this step's verify or target extend
        self.selected: Mark | None = None  # rows of it, for the seed step
        self._held: dict[int, tuple[weakref.ref[Any], Mark]] = {}  # by id() of a draft input

    def made_by_forward(self, hidden: torch.Tensor | None) -> Violation | None:
        """A forward's hidden states; not those of the step before."""
        stale = hidden is not None and self.made is not None and self.made.tensor() is hidden
        self.made = None if hidden is None else Mark.of(hidden)
        if stale:
            return _stale("this forward's", "those of the step before")
        return None

    def check_made(self, hidden: torch.Tensor | None) -> Violation | None:
        why = "" if self.made is None else self.made.differs(hidden)
        return _stale("those that this step's forward made", why) if why else None

    def select(self, hidden: torch.Tensor | None) -> None:
        """Remember what was picked out of them for the seed step."""
        self.selected = None if hidden is None else Mark.of(hidden)

    def check_selected(self, hidden: torch.Tensor | None) -> Violation | None:
        why = "" if self.selected is None else self.selected.differs(hidden)
        self.selected = None
        return _stale("those that were selected for the seed step", why) if why else None

    def hold(self, spec: Any) -> None:
        """Remember the hidden states that a draft input carries from here on."""
        hidden = getattr(spec, "hidden_states", None)
        if len(self._held) > 64:
            self._held = {k: v for k, v in self._held.items() if v[0]() is not None}
        if hidden is None:
            self._held.pop(id(spec), None)
        else:
            self._held[id(spec)] = (weakref.ref(spec), Mark.of(hidden))

    def check_held(self, spec: Any) -> Violation | None:
        """A draft input of unknown origin is not judged."""
        owner, mark = self._held.get(id(spec), (None, None))
        if owner is None or mark is None or owner() is not spec:
            return None
        why = mark.differs(getattr(spec, "hidden_states", None))
        return _stale("those that the last hand-over left in it", why) if why else None


def _stale(expected: str, got: str) -> Violation:
    return Violation("stale-hidden-state", expected, got, what="hidden_states")
