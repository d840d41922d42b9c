"""Checks that a draft gets the hidden states of its own step."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from g4debug.tracers.spec_lifecycle.check import Violation

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(hidden: torch.Tensor) -> torch.Tensor:
    """One number for each row of hidden states [rows, hidden size]: int64 [rows], on their device.

    It is the sum of the rows' bits as integers, so it does not depend on the order of the sum, nor
    on how many rows there are. One launch.
    """
    return hidden.view(_BITS[hidden.element_size()]).sum(-1, dtype=torch.int64)


class Mark(NamedTuple):
    """Identifies a tensor: which object it is, and how often it was written to."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Mark:
        return Mark(weakref.ref(tensor), _version(tensor))

    def differs(self, tensor: torch.Tensor | None) -> str:
        """'' if ``tensor`` is the same tensor and unchanged, else the difference in words."""
        if tensor is None:
            return "None"
        if self.tensor() is not tensor:
            return "another tensor"
        return "" if self.version == _version(tensor) else "a tensor that was written to since then"


def _version(tensor: torch.Tensor) -> int:
    # In inference mode torch does not count writes. Then only another object is noticed.
    return -1 if tensor.is_inference() else int(tensor._version)


class Custody:
    """Follows the hidden states from the forward that made them to the draft that reads them.

    It compares which tensor it is, and torch's counter of writes to it, but never values. So
    nothing is read from a device.
    """

    def __init__(self) -> None:
        self.made: Mark | None = None  # by this step's verify or target extend
        self.selected: Mark | None = None  # the rows of them that the seed step gets
        self._held: dict[int, tuple[weakref.ref[Any], Mark]] = {}  # by id() of a draft input

    def made_by_forward(self, hidden: torch.Tensor | None) -> Violation | None:
        """Remember a forward's hidden states. They must not be the last step's tensor."""
        stale = hidden is not None and self.made is not None and self.made.tensor() is hidden
        self.made = None if hidden is None else Mark.of(hidden)
        if stale:
            return _stale("this forward's", "those of the step before")
        return None

    def check_made(self, hidden: torch.Tensor | None) -> Violation | None:
        """These must be the hidden states that this step's forward made."""
        why = "" if self.made is None else self.made.differs(hidden)
        return _stale("those that this step's forward made", why) if why else None

    def select(self, hidden: torch.Tensor | None) -> None:
        """Remember the rows that were selected from them for the seed step."""
        self.selected = None if hidden is None else Mark.of(hidden)

    def check_selected(self, hidden: torch.Tensor | None) -> Violation | None:
        """These must be the hidden states that were selected for the seed step."""
        why = "" if self.selected is None else self.selected.differs(hidden)
        self.selected = None
        return _stale("those that were selected for the seed step", why) if why else None

    @staticmethod
    def check_relayed(left: Mark, found: torch.Tensor | None) -> Violation | None:
        """These must be the hidden states that were stashed in SGLang's FutureMap."""
        why = left.differs(found)
        return _stale("those that were stashed in the FutureMap", why) if why else None

    def hold(self, spec: Any) -> None:
        """Remember the hidden states that a draft input carries from now on."""
        hidden = getattr(spec, "hidden_states", None)
        if len(self._held) > 64:
            self._held = {k: v for k, v in self._held.items() if v[0]() is not None}
        if hidden is None:
            self._held.pop(id(spec), None)
        else:
            self._held[id(spec)] = (weakref.ref(spec), Mark.of(hidden))

    def holds(self, spec: Any) -> bool:
        """True if a draft input is known, and still carries its hidden states."""
        mark = self._mark(spec)
        return mark is not None and not mark.differs(getattr(spec, "hidden_states", None))

    def check_held(self, spec: Any) -> Violation | None:
        """A draft input must still carry its hidden states. One of unknown origin is not judged."""
        mark = self._mark(spec)
        if mark is None:
            return None
        why = mark.differs(getattr(spec, "hidden_states", None))
        return _stale("those that the last hand-over left in it", why) if why else None

    def _mark(self, spec: Any) -> Mark | None:
        """The hidden states that a draft input was given, None if they are not known."""
        owner, mark = self._held.get(id(spec), (None, None))
        return mark if owner is not None and owner() is spec else None


def _stale(expected: str, got: str) -> Violation:
    return Violation("stale-hidden-state", expected, got, what="hidden_states")
