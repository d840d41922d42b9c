"""Reads ``batch.spec_info``: its state, and how many rows its tensors have."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from g4debug import speculation
from g4debug.tracers.spec_lifecycle.check import (
    DRAFT,
    EXTEND,
    IDLE,
    VERIFY,
    Violation,
    check_rows,
    check_state,
)
from g4debug.tracers.spec_lifecycle.hidden_states import Custody

_SUFFIXES = (("DraftExtendInput", EXTEND), ("DraftInput", DRAFT), ("VerifyInput", VERIFY))
Worker = speculation.Adapter
_known: dict[tuple[type, str], tuple[str, Worker | None]] = {}


def state_of(spec: Any, worker: Worker | None = None) -> str:
    """The state of a ``spec_info``. If the worker has no such, the name of its type.

    worker: the one that it is for; None for any that is known.
    """
    state, found = _look(type(spec), worker)
    both = found is not None and found.verifies is not None
    return state if not both or found.verifies(spec) else DRAFT  # type: ignore[union-attr,misc]


def _look(kind: type, worker: Worker | None) -> tuple[str, Worker | None]:
    """The state by the name of a class, and the worker with which it has this name."""
    key = kind, worker.prefix if worker is not None else ""
    if key not in _known:
        workers = speculation.adapters() if worker is None else (worker,)
        found: list[tuple[str, Worker | None]] = [
            (state, of)
            for name in (c.__name__ for c in kind.__mro__)
            for of in workers
            for suffix, state in _SUFFIXES
            if name.startswith(of.prefix) and name.endswith(suffix)
        ]
        _known[key] = found[0] if found else (IDLE if kind is type(None) else kind.__name__, None)
    return _known[key]


def check_fields(spec: Any, fields: Sequence[str], rows: int) -> Violation | None:
    """Each of these tensors must have so many rows. Reads nothing from a device."""
    for name in fields:
        tensor = getattr(spec, name, None)
        have = -1 if tensor is None else int(tensor.shape[0])
        if have != rows:
            return check_rows({name: have}, {name: rows})
    return None


def fields_of(spec: Any, relayed: bool, worker: Worker | None = None) -> tuple[str, ...]:
    """What a draft input has a row of for each request.

    relayed: it came by the FutureMap. worker: that of its server; None for one with such a class.
    """
    worker = worker or _look(type(spec), None)[1]
    fields = () if worker is None else worker.fields + (() if relayed else worker.first)
    return fields if hidden_of(spec, worker) is None else (*fields, "hidden_states")


def hidden_of(spec: Any, worker: Worker | None) -> Any:
    """The hidden states that a draft input hands on, a row for each request; None without any."""
    if worker is not None and not worker.hands_hidden:
        return None
    return getattr(spec, "hidden_states", None)


def check_draft_input(
    custody: Custody, spec: Any, requests: int, worker: Worker | None = None
) -> Violation | None:
    """It must have one row for each request, and the hidden states that were handed over."""
    fields = fields_of(spec, relayed=False, worker=worker)
    return check_fields(spec, fields, requests) or custody.check_held(spec)


def check_verify_input(
    spec: Any, requests: int, drafted: weakref.ref[Any] | None
) -> Violation | None:
    """A verify gets the verify input that this step's draft made, with all of its rows.

    drafted: the draft's result, None if no draft was seen.
    """
    violation = check_state(state_of(spec), type(spec).__name__, (VERIFY,))
    if violation is not None:
        return violation
    if drafted is not None and drafted() is not spec:
        return Violation("wrong-type", "the verify-input of this step's draft", "another object")
    nodes = requests * spec.draft_token_num
    return check_fields(spec, ("draft_token", "positions"), nodes) or check_fields(
        spec, ("retrieve_index",), requests
    )
