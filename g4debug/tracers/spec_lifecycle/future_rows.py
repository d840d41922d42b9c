"""Follows who wrote each row of SGLang's FutureMap last, and in which step.

The FutureMap is on the device. This follows facts on the host: which requests a batch has, and
which row of ``req_to_token`` each of them has.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from g4debug.hooking import req_kv
from g4debug.tracers.spec_lifecycle.check import Violation, check_owners, check_written
from g4debug.tracers.spec_lifecycle.copies import Copies

LENGTHS, SEED = "lengths", "bonus token and hidden state"


def goes_on(request: Any) -> bool:
    """False for a request that finished or was retracted: overlap may still run it once more."""
    return request.finished_reason is None and not request.is_retracted


def live_rows(requests: Sequence[Any]) -> list[int]:
    """The positions in the batch of the requests that go on."""
    return [i for i, r in enumerate(requests) if r.finished_reason is None and not r.is_retracted]


class Written:
    """The values that one step wrote so far, into the rows of all its requests.

    copies: the values, on their way to the host.
    """

    def __init__(
        self, step: int, copies: Copies | None = None, requests: Sequence[Any] = ()
    ) -> None:
        self.step = step
        self.published = self.stashed = False
        self.copies = copies
        self._order = list(map(id, requests))  # of requests that somebody else keeps

    def values(self, key: str, requests: Sequence[int]) -> list[int | None]:
        """The step's values for these requests, by id(). None: not known, or not here yet."""
        values = self.copies.get() if self.copies is not None else None
        numbers = values.get(key) if values is not None else None
        if numbers is None or len(numbers) != len(self._order):
            return [None] * len(requests)
        if requests == self._order:
            return [*numbers]
        of = dict(zip(self._order, numbers, strict=True))
        return [of.get(request) for request in requests]


class Last:
    """For each request of a batch, its last step. The batch's step reads the values it left."""

    def __init__(self, requests: Sequence[Any], written: Sequence[Written | None]) -> None:
        self._requests = list(map(id, requests))
        self._written = written

    def left(self, key: str) -> list[int | None]:
        """The values that each request's last step left. None: not known, or not here yet."""
        by = {id(w): w for w in self._written if w is not None}
        found = {at: w.values(key, self._requests) for at, w in by.items()}
        if len(by) == 1 and None not in self._written:
            return next(iter(found.values()))
        return [None if w is None else found[id(w)][i] for i, w in enumerate(self._written)]


@dataclass
class _Row:
    request: weakref.ref[Any]
    rid: str
    by: Written  # the last step of the request


class FutureRows:
    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def last(self, rows: Sequence[int], requests: Sequence[Any]) -> Last:
        """The last steps of these requests, as far as they were followed."""
        entries = (self._rows.get(row) for row in rows)
        pairs = zip(entries, requests, strict=True)
        return Last(
            requests, [e.by if e is not None and e.request() is r else None for e, r in pairs]
        )

    def run(
        self, written: Written, rows: Sequence[int], requests: Sequence[Any]
    ) -> Violation | None:
        """These requests run in this step, which will write their rows."""
        violation = None
        entries = [self._rows.get(row) for row in rows]
        same = all(
            e is not None and e.request() is r for e, r in zip(entries, requests, strict=True)
        )
        if not same or len(set(rows)) < len(rows):
            owners = [self._owner(row, r) for row, r in zip(rows, requests, strict=True)]
            violation = check_owners(rows, [str(r.rid) for r in requests], owners)
        for entry, row, request in zip(entries, rows, requests, strict=True):
            if entry is not None and entry.request() is request:
                entry.by = written
            else:
                self._rows[row] = _Row(weakref.ref(request), str(request.rid), written)
        return violation

    def _owner(self, row: int, request: Any) -> str | None:
        """The request, if another one, that lives and has this row."""
        entry = self._rows.get(row)
        owner = None if entry is None else entry.request()
        if owner is None or owner is request:
            return None
        lives = goes_on(owner) and req_kv.row(owner) == row
        return str(owner.rid) if lives else None

    def check(self, what: str, rows: Sequence[int], requests: Sequence[Any]) -> Violation | None:
        """These requests read ``what`` (LENGTHS or SEED) from these rows now.

        It must have been written in the last step that ran the request. A row into which nobody was
        seen to write is not judged.
        """
        wrong = []
        for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
            entry = self._rows.get(row)
            if entry is None:
                continue
            there = entry.by.published if what == LENGTHS else entry.by.stashed
            if not there or entry.request() is not request:
                wrong.append((i, entry if there else None))
        if not wrong:
            return None
        i, entry = wrong[0]
        by = None if entry is None else (entry.rid, entry.by.step)
        return check_written(what, rows[i], str(requests[i].rid), by, i)
