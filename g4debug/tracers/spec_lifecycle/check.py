"""What must hold at the hand-overs of speculative decoding, on plain values.

``batch.spec_info`` goes through these states: nothing, draft input, verify input, draft-extend
input, and draft input again. A verify accepts for each request at least the bonus token, and at
most one token more than there are draft steps. Everything that counts tokens must go forward by
exactly that many, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Literal

IDLE, DRAFT, VERIFY, EXTEND = "idle", "draft-input", "verify-input", "draft-extend-input"
Kind = Literal[
    "verify-input-left",
    "spec-info-dropped",
    "wrong-type",
    "wrong-shape",
    "accept-length",
    "seq-len",
    "bookkeeping",
    "stale-hidden-state",
]


@dataclass(frozen=True)
class Violation:
    """What is wrong.

    row: the position in the batch, -1 if the whole batch is concerned. what: the field that is
    wrong, '' if it is none. off: how much too high its number is (below 0: too low), 0 if it is no
    number, or if it is not known.
    """

    kind: Kind
    expected: str
    got: str
    row: int = -1
    what: str = ""
    off: int = 0


def check_state(state: str, type_name: str, allowed: Sequence[str]) -> Violation | None:
    """A ``spec_info`` must be in one of the ``allowed`` states. ``type_name``: its type."""
    if state in allowed:
        return None
    kinds: dict[str, Kind] = {IDLE: "spec-info-dropped", VERIFY: "verify-input-left"}
    kind = kinds.get(state, "wrong-type")
    if kind == "verify-input-left" and DRAFT not in allowed:
        kind = "wrong-type"
    got = "None" if state == IDLE else f"{state} ({type_name})"
    return Violation(kind, " or ".join(allowed), got, what="spec_info")


def check_rows(rows: Mapping[str, int], wanted: Mapping[str, int]) -> Violation | None:
    """Each field must have as many rows as wanted. -1 stands for a field that is None."""
    for name, want in wanted.items():
        have = rows.get(name, want)
        if have != want:
            got = f"{name} has {have} rows" if have >= 0 else f"{name} is None"
            off = have - want if have >= 0 else 0
            return Violation("wrong-shape", f"{want} rows", got, what=name, off=off)
    return None


def check_accepted(correct: Sequence[int], requests: int, steps: int) -> Violation | None:
    """Each request must have 0..``steps`` accepted drafts; the bonus token is not among them."""
    if len(correct) != requests:
        got = f"accept lengths of {len(correct)} requests"
        return Violation("accept-length", f"accept lengths of {requests} requests", got)
    if correct and (min(correct) < 0 or max(correct) > steps):
        row = next(i for i, n in enumerate(correct) if not 0 <= n <= steps)
        return Violation(
            "accept-length",
            f"an accept length of 1..{steps + 1}",
            f"accept length {correct[row] + 1}",
            row,
            "num_correct_drafts",
            correct[row] - (steps if correct[row] > steps else 0),
        )
    return None


def check_counts(
    kind: Kind, what: str, expected: Sequence[int], got: Sequence[int]
) -> Violation | None:
    """Two lists with one number for each request must be equal."""
    if expected == got or list(expected) == list(got):
        return None
    if len(expected) != len(got):
        return Violation(
            kind, f"{what} of {len(expected)} requests", f"{what} of {len(got)} requests", what=what
        )
    row = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
    off = got[row] - expected[row]
    return Violation(
        kind, f"{what} = {expected[row]}", f"{what} = {got[row]} ({off:+d})", row, what, off
    )


def check_advance(
    kind: Kind, what: str, before: Sequence[int], after: Sequence[int], by: Sequence[int]
) -> Violation | None:
    """``after`` must be ``before`` plus ``by``, for each request."""
    if len(before) != len(by):
        return check_counts(kind, what, before, after)
    return check_counts(kind, what, list(map(add, before, by)), after)
