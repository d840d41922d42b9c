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

DRAFT_FIELDS = ("bonus_tokens", "topk_p", "topk_index")
_SUFFIXES = (("DraftExtendInput", EXTEND), ("DraftInput", DRAFT), ("VerifyInput", VERIFY))
_states: dict[type, str] = {type(None): IDLE}


def state_of(spec: Any) -> str:
    """The state of a ``spec_info``. If no known worker has such, the name of its type."""
    kind = type(spec)
    state = _states.get(kind)
    if state is None:
        prefixes = tuple(adapter.prefix for adapter in speculation.adapters())
        ours = [c.__name__ for c in kind.__mro__ if c.__name__.startswith(prefixes)]
        found = [s for name in ours for suffix, s in _SUFFIXES if name.endswith(suffix)]
        state = _states[kind] = found[0] if found else kind.__name__
    return state


def check_fields(spec: Any, fields: Sequence[str], rows: int) -> Violation | None:
    """Each of these tensors must have so many rows. Reads nothing from a device."""
    for name in fields:
        tensor = getattr(spec, name, None)
        have = -1 if tensor is None else int(tensor.shape[0])
        if have != rows:
            return check_rows({name: have}, {name: rows})
    return None


def check_draft_input(custody: Custody, spec: Any, requests: int) -> Violation | None:
    """It must have one row for each request, and the hidden states that were handed over."""
    hidden = getattr(spec, "hidden_states", None)
    fields = DRAFT_FIELDS if hidden is None else (*DRAFT_FIELDS, "hidden_states")
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
