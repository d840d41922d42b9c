"""Follows what SGLang counts for each request when it processes the result of a v2 verify.

Only this processing may count. So from its end until it begins for the next result of the same
request, nothing may change, unless the request is retracted or prefilled meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from g4debug.hooking import req_kv
from g4debug.tracers.spec_lifecycle.check import Violation, at_rows, check_advance, check_counts
from g4debug.tracers.spec_lifecycle.future_rows import goes_on

OUTPUT, COMMITTED, VERIFIES = "output_ids", "kv_committed_len", "spec_verify_ct"
Counts = tuple[int, int, int]
_NAMES = (OUTPUT, COMMITTED, VERIFIES)


def counts_of(request: Any) -> Counts:
    return len(request.output_ids), req_kv.committed(request), request.spec_verify_ct


class Committing:
    def __init__(self) -> None:
        # What a request was left with.
        self._known: weakref.WeakKeyDictionary[Any, Counts] = weakref.WeakKeyDictionary()
        self._live: list[int] = []  # rows of the requests that the current result is for
        self._before: list[Counts] = []

    def forget(self, requests: Sequence[Any]) -> None:
        """These are prefilled, which counts in another way."""
        for request in requests:
            self._known.pop(request, None)

    def begin(self, requests: Sequence[Any]) -> Violation | None:
        """A result is about to be processed: nothing was counted since the one before."""
        self._live = [i for i, r in enumerate(requests) if goes_on(r)]
        live = [requests[i] for i in self._live]
        self._before = [counts_of(r) for r in live]
        known = [self._known.get(r, now) for r, now in zip(live, self._before, strict=True)]
        for i, name in enumerate(_NAMES):
            violation = check_counts(
                "bookkeeping", name, [c[i] for c in known], [c[i] for c in self._before]
            )
            if violation is not None:
                return at_rows(violation, self._live)
        return None

    def check(
        self, requests: Sequence[Any], accepted: Sequence[int], kept: Sequence[Sequence[int]]
    ) -> Violation | None:
        """The result was resolved: committed and counted once, but not put out yet.

        accepted: the accept length of each request. kept: the tokens that each request is given,
        which are fewer if its grammar ended.
        """
        live = [requests[i] for i in self._live]
        now = [counts_of(r) for r in live]
        given = [len(kept[i]) for i in self._live]
        free = [i for i in self._live if requests[i].grammar is None]
        violation = at_rows(
            check_counts(
                "accept-length",
                "accepted tokens",
                [accepted[i] for i in free],
                [len(kept[i]) for i in free],
            ),
            free,
        )
        if violation is not None:
            return violation
        by = {OUTPUT: [0] * len(live), COMMITTED: given, VERIFIES: [1] * len(live)}
        for i, name in enumerate(_NAMES):
            violation = check_advance(
                "bookkeeping", name, [c[i] for c in self._before], [c[i] for c in now], by[name]
            )
            if violation is not None:
                return at_rows(violation, self._live)
        for request, counts, more in zip(live, now, given, strict=True):
            self._known[request] = (counts[0] + more, counts[1], counts[2])
        return None

    def check_sent(self, requests: Sequence[Any]) -> Violation | None:
        """The tokens of these requests are about to leave: each was put out once.

        A request that finished has given its KV back, so its ``kv_committed_len`` is not looked at.
        """
        for row, request in enumerate(requests):
            known = self._known.get(request)
            if known is None:
                continue
            if request.is_retracted:
                del self._known[request]
                continue
            now = counts_of(request)
            if request.finished():
                del self._known[request]
                now = (now[0], known[1], now[2])
            if getattr(request, "return_sampling_mask", False) and request.finished():
                continue  # SGLang may put out nothing and end it
            for i, name in enumerate(_NAMES):
                if now[i] != known[i]:
                    off = now[i] - known[i]
                    got = f"{name} = {now[i]} ({off:+d})"
                    return Violation("bookkeeping", f"{name} = {known[i]}", got, row, name, off)
        return None
