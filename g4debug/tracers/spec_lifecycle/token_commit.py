"""Follows SGLang's counters of each request as it processes the results of v2 verifies.

Only this processing may count. So from its end until it begins for the next result of the same
request, nothing may change, unless the request is retracted or prefilled meanwhile.

Where a request may end inside a verify (``cuts``), it may be given fewer tokens than were accepted.
Then it must have ended when its tokens leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, attrgetter
from typing import Any

from g4debug.hooking import req_kv
from g4debug.tracers.spec_lifecycle import handed_on as h
from g4debug.tracers.spec_lifecycle.check import Violation, at_rows, check_counts
from g4debug.tracers.spec_lifecycle.check_values import SAMPLED, Rows
from g4debug.tracers.spec_lifecycle.future_rows import goes_on, live_rows
from g4debug.tracers.spec_lifecycle.pending_steps import Books, committed
from g4debug.tracers.spec_lifecycle.sampled_tokens import no_token

OUTPUT, VERIFIES = "output_ids", "spec_verify_ct"
_NAMES = (OUTPUT, req_kv.COMMITTED, VERIFIES)
_outputs, _verifies = attrgetter("output_ids"), attrgetter("spec_verify_ct")
Columns = list[list[int]]  # one list for each of _NAMES, with a number for each request


def columns_of(requests: Sequence[Any], books: Books = committed) -> Columns:
    return [
        list(map(len, map(_outputs, requests))),
        books(requests),
        list(map(_verifies, requests)),
    ]


def _compare(expected: Columns, got: Columns) -> Violation | None:
    if expected == got:
        return None
    for name, want, have in zip(_NAMES, expected, got, strict=True):
        violation = check_counts("bookkeeping", name, want, have)
        if violation is not None:
            return violation
    return None


class Committing:
    """Checks that each processed result counts its tokens once, and that nothing else does.

    books: gives each request's committed tokens. cuts: a request that ends inside a verify is given
    fewer tokens than were accepted.
    """

    def __init__(self, books: Books = committed, cuts: bool = False) -> None:
        self._books = books
        self._cuts = cuts
        self._cut: set[int] = set()  # by id(): requests that were given fewer tokens
        self._live: list[int] = []  # positions in the batch of the requests that it counts for
        self._requests: list[Any] = []  # these requests
        self._known: Columns = [[], [], []]  # what they are left with
        self._forgotten: set[int] = set()  # by id(): they were prefilled since
        # Where the tokens that each of them was given last begin in its output, and the tokens.
        self._given: list[tuple[int, Sequence[int]]] = []

    def forget(self, requests: Sequence[Any]) -> None:
        """These are prefilled, which counts in another way."""
        self._forgotten.update(map(id, requests))

    def begin(self, requests: Sequence[Any]) -> Violation | None:
        """A result is about to be processed: nothing was counted since the one before."""
        live = live_rows(requests)
        now = list(requests) if len(live) == len(requests) else [requests[i] for i in live]
        columns = columns_of(now, self._books)
        expected = self._known
        if self._forgotten or now != self._requests:
            expected = self._expected(now, columns)
        self._live, self._requests, self._known = live, now, columns
        self._forgotten.clear()
        return at_rows(_compare(expected, columns), live)

    def _expected(self, requests: Sequence[Any], now: Columns) -> Columns:
        """The numbers that each request must have: its last ones, or its own if it is new."""
        left = {id(r): i for i, r in enumerate(self._requests) if id(r) not in self._forgotten}
        at = [left.get(id(r), -1) for r in requests]
        return [
            [known[i] if i >= 0 else has for i, has in zip(at, column, strict=True)]
            for known, column in zip(self._known, now, strict=True)
        ]

    def check(
        self, requests: Sequence[Any], accepted: Sequence[int], kept: Sequence[Sequence[int]]
    ) -> Violation | None:
        """The result was resolved: committed and counted once, but not put out yet.

        accepted: the accept length of each request. kept: the tokens that each request is given,
        which are fewer if its grammar ended.
        """
        live = self._live
        given = [len(kept[i]) for i in live]
        taken = [accepted[i] for i in live]
        if self._cuts and given != taken:
            pairs = zip(self._requests, given, taken, strict=True)
            self._cut = {id(r) for r, m, n in pairs if 0 < m < n}
            pairs = zip(self._requests, given, taken, strict=True)
            taken = [m if id(r) in self._cut else n for r, m, n in pairs]
        if given != taken:
            free = [
                n if r.grammar is None else m
                for r, n, m in zip(self._requests, taken, given, strict=True)
            ]
            violation = check_counts("accept-length", "accepted tokens", free, given)
            if violation is not None:
                return at_rows(violation, live)
        outputs, kv, verifies = self._known
        kv, verifies = list(map(add, kv, given)), [n + 1 for n in verifies]
        now = columns_of(self._requests, self._books)
        violation = _compare([outputs, kv, verifies], now)
        self._known = [list(map(add, outputs, given)), kv, verifies]
        self._given = [(n, kept[i]) for n, i in zip(outputs, live, strict=True)]
        return at_rows(violation, live)

    def check_sent(self, requests: Sequence[Any]) -> Violation | None:
        """The tokens of these requests are about to leave: each was put out once.

        A request that finished has given its KV back, so its ``kv_committed_len`` is not looked at.
        One that was prefilled since then is not looked at, and those that ended are let go.
        """
        if not self._requests:
            return None
        violation = self._check_cut(requests)
        if violation is not None:
            return violation
        known = self._known
        now = columns_of(self._requests, self._books)
        if now != known:
            given = set(map(id, requests))
            for i, request in enumerate(self._requests):
                unknown = request.is_retracted or id(request) in self._forgotten
                # SGLang may put out nothing and end it if it was to return a sampling mask.
                masked = getattr(request, "return_sampling_mask", False) and request.finished()
                if unknown or masked or id(request) not in given:
                    for column, have in zip(known, now, strict=True):
                        column[i] = have[i]
                elif request.finished():
                    known[1][i] = now[1][i]
                    known[0][i] = _until_its_end(request, known[0][i], now[0][i])
            violation = _compare(known, now)
            if violation is not None:
                where = {id(r): i for i, r in enumerate(requests)}
                return at_rows(violation, [where[id(r)] for r in self._requests])
        violation = self._check_tokens(requests)
        if violation is not None:
            return violation
        if not all(map(goes_on, self._requests)):
            on = live_rows(self._requests)
            self._requests = [self._requests[i] for i in on]
            self._known = [[column[i] for i in on] for column in known]
        return None

    def _check_tokens(self, requests: Sequence[Any]) -> Violation | None:
        """Each request's output has the tokens that it was given. They are checked once.

        A request that has ended may have less: a turn of a session is cut at its end, and one that
        was to return a sampling mask may be given nothing. SGLang also replaces a token that is no
        word of the vocabulary, and ends the request with it.
        """
        given, self._given = self._given, []
        where = {id(r): i for i, r in enumerate(requests)}
        for request, (start, tokens) in zip(self._requests, given, strict=len(given) > 0):
            row = where.get(id(request), -1)
            if row < 0 or request.is_retracted:
                continue
            got = list(request.output_ids[start : start + len(tokens)])
            made = list(tokens[: len(got)])
            if not goes_on(request):
                pairs = zip(made, got, strict=True)
                got = [m if no_token(request, m) else g for m, g in pairs]
            if got != made:
                rows = Rows([str(request.rid)], (0,))
                found = rows.check(SAMPLED, (h.KEPT, made), (h.OUTPUT, got), len(made))
                return at_rows(found, [row])
        return None

    def _check_cut(self, requests: Sequence[Any]) -> Violation | None:
        """A request that was given fewer tokens than were accepted has ended with them."""
        cut, self._cut = self._cut, set()
        for row, request in enumerate(requests if cut else ()):
            if id(request) in cut and goes_on(request):
                return Violation(
                    "accept-length",
                    "all accepted tokens given to a request that goes on",
                    "fewer accepted tokens given",
                    row,
                    "accepted tokens",
                )
        return None


def _until_its_end(request: Any, known: int, has: int) -> int:
    """How many tokens a request that has finished must have; so far they were ``known``.

    A verify may go on behind the last token that was asked for. A turn of a streaming session is
    left with the tokens up to its end, because the next turn begins with them (SGLang's
    ``StreamingSession._trim_overshoot``).
    """
    session = getattr(request, "session", None)
    cut = session is not None and has < known and has == getattr(request, "finished_len", None)
    return has if cut else known
