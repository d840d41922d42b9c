"""What the spec-lifecycle tracer remembers between hand-overs. Host memory only."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from g4debug.findings.record import Transition
from g4debug.tracers.spec_lifecycle.check import (
    DRAFT,
    EXTEND,
    IDLE,
    VERIFY,
    Violation,
    check_counts,
)

HISTORY = 32
_SUFFIXES = (("DraftExtendInput", EXTEND), ("DraftInput", DRAFT), ("VerifyInput", VERIFY))
_states: dict[type, str] = {type(None): IDLE}


def state_of(spec: Any) -> str:
    """Typestate of a ``spec_info``: one of FROZEN_KV_MTP's, or the name of another type."""
    kind = type(spec)
    state = _states.get(kind)
    if state is None:
        ours = [c.__name__ for c in kind.__mro__ if c.__name__.startswith("FrozenKVMTP")]
        found = [s for name in ours for suffix, s in _SUFFIXES if name.endswith(suffix)]
        state = _states[kind] = found[0] if found else kind.__name__
    return state


def rows_of(spec: Any, *fields: str) -> dict[str, int]:
    """First dimension of each tensor, -1 for one that is None; no read of a device."""
    values = ((name, getattr(spec, name, None)) for name in fields)
    return {name: -1 if v is None else int(v.shape[0]) for name, v in values}


class History:
    """The last hand-overs of all batches of the process, kept as plain tuples until asked for."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, str, str, str, int, str]] = deque(maxlen=HISTORY)

    def add(
        self, step: int, site: str, before: str, after: str, requests: int, note: str = ""
    ) -> None:
        self._seen.append((step, site, before, after, requests, note))

    def transitions(self, *last: Transition) -> tuple[Transition, ...]:
        """Oldest first, then ``last``."""
        return (*(Transition(*seen) for seen in self._seen), *last)


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


class DeviceLengths:
    """Compares ``batch.seq_lens`` on the device with the host's copy, without waiting for it.

    An asynchronous copy to pinned memory starts before the draft and is looked at after the
    verify, which has waited for the same stream anyway. On a CPU the two are compared at once.
    """

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._expected: list[int] | None = None

    def start(self, seq_lens: torch.Tensor, expected: list[int]) -> Violation | None:
        """seq_lens: integer [requests]; expected: the host's lengths."""
        if not seq_lens.is_cuda:
            return _compare(expected, seq_lens.tolist())
        if self._expected is not None:
            return None  # the last copy was never looked at: its buffer may be in flight
        size = seq_lens.shape[0]
        if self._pinned is None or self._pinned.shape[0] < size or self._event is None:
            self._pinned = torch.empty(max(1024, 2 * size), dtype=torch.int64, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned[:size].copy_(seq_lens, non_blocking=True)
        self._event.record()
        self._expected = expected
        return None

    def look(self) -> Violation | None:
        """The result of the last start, if it is there."""
        if self._expected is None or self._pinned is None or self._event is None:
            return None
        if not self._event.query():  # type: ignore[no-untyped-call]
            return None
        expected, self._expected = self._expected, None
        return _compare(expected, self._pinned[: len(expected)].tolist())


def _compare(expected: list[int], got: list[int]) -> Violation | None:
    return check_counts("seq-len", "seq_lens on the device", expected, got)
