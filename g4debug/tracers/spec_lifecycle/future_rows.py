"""Follows who wrote each row of SGLang's FutureMap last, and in which step.

The FutureMap is on the device. What is followed here is known on the host: which requests a batch
has, and which row of ``req_to_token`` each of them has.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from g4debug.hooking import req_kv
from g4debug.tracers.spec_lifecycle.check import Violation, check_owners, check_written

LENGTHS, SEED = "lengths", "bonus token and hidden state"


def goes_on(request: Any) -> bool:
    """False for a request that finished or was retracted: overlap may still run it once more."""
    return not (request.finished() or request.is_retracted)


@dataclass
class _Row:
    request: weakref.ref[Any]
    rid: str
    published: int = 0  # the step, 0 for never
    stashed: int = 0


class FutureRows:
    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._ran: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def run(self, step: int, rows: Sequence[int], requests: Sequence[Any]) -> Violation | None:
        """These requests run in this step, so it will write their rows."""
        rids = [str(r.rid) for r in requests]
        owners = [self._owner(row, r) for row, r in zip(rows, requests, strict=True)]
        violation = check_owners(rows, rids, owners)
        for row, request, rid in zip(rows, requests, rids, strict=True):
            entry = self._rows.get(row)
            if entry is None or entry.request() is not request:
                entry = self._rows[row] = _Row(weakref.ref(request), rid)
            self._ran[request] = step
        return violation

    def _owner(self, row: int, request: Any) -> str | None:
        """The request, if another one, that lives and has this row."""
        entry = self._rows.get(row)
        owner = None if entry is None else entry.request()
        if owner is None or owner is request:
            return None
        lives = goes_on(owner) and req_kv.row(owner) == row
        return str(owner.rid) if lives else None

    def publish(self, step: int, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows[row].published = step

    def stash(self, step: int, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows[row].stashed = step

    def check(self, what: str, rows: Sequence[int], requests: Sequence[Any]) -> Violation | None:
        """These requests read ``what`` (LENGTHS or SEED) from these rows now.

        A row of a request that was never seen to run is not judged.
        """
        last: list[int] = []
        written: list[tuple[str, int] | None] = []
        for row, request in zip(rows, requests, strict=True):
            entry = self._rows.get(row)
            step = 0
            if entry is not None:
                step = entry.published if what == LENGTHS else entry.stashed
            if entry is None or (entry.request() is not request and request not in self._ran):
                last.append(0)
                written.append((str(request.rid), 0))
                continue
            last.append(self._ran[request])
            written.append((entry.rid, step) if step else None)
        return check_written(what, rows, [str(r.rid) for r in requests], last, written)
