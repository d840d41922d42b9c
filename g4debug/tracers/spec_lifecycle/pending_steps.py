"""Keeps the values of a worker's step until SGLang processes the step's result.

With overlap scheduling the next step begins before that. When the result is processed, SGLang knows
on the host which tokens were accepted, and its own books (``kv_committed_len``, ``output_ids``)
have come to the beginning of this step. So the values that the step had on the device are compared
with the books then, before any of its tokens leaves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from g4debug import speculation
from g4debug.hooking import req_kv
from g4debug.tracers.spec_lifecycle import handed_on as h
from g4debug.tracers.spec_lifecycle.check import (
    Violation,
    at_rows,
    check_accepted,
    check_advance,
    check_allocated,
    check_bonus,
    check_counts,
    check_publish,
    check_same_rows,
)
from g4debug.tracers.spec_lifecycle.check_values import BONUS as BONUS_TOKEN
from g4debug.tracers.spec_lifecycle.check_values import (
    SAMPLED,
    STALE,
    Rows,
    Verify,
    check_from_last,
    check_host,
    check_verify_input,
    check_verify_result,
)
from g4debug.tracers.spec_lifecycle.copies import MOST, Copies
from g4debug.tracers.spec_lifecycle.future_rows import Last, Written, live_rows

Some = Callable[[Sequence[Any]], Sequence[Any]]  # takes the requests that go on
Books = Callable[[Sequence[Any]], list[int]]  # how many tokens of each request are committed
INDICES, LENS, BONUS, NEW_LENS = h.INDICES.key, h.LENS.key, h.BONUS.key, h.NEW_LENS.key


def committed(requests: Sequence[Any]) -> list[int]:
    """SGLang's number of committed tokens, for releases that count nothing in advance."""
    return req_kv.column(requests, req_kv.COMMITTED)


@dataclass
class PendingStep:
    """One step of the worker, for a batch that is not idle.

    number: the number of the step. decode: False for a prefill. rows: of ``req_to_token``, one for
    each request. indices: the tensor of these rows on the device. lens: SGLang's lengths on the
    host, None if it has none there. depth: the most tokens that a verify can accept. width: for how
    many tokens a verify writes KV.
    """

    number: int
    decode: bool
    overlap: bool
    requests: tuple[Any, ...]
    rows: list[int]
    indices: Any
    lens: list[int] | None
    allocated: list[int]
    depth: int
    width: int
    copies: Copies
    worker: speculation.Adapter
    books: Books = committed
    chain: bool = True  # there is one draft path
    simulated: bool = False  # SGLang makes up the accepted tokens
    local: bool = True  # this rank samples the tokens itself
    last: Last | None = None  # what each request's last step left, None if it is not followed
    tokens: Sequence[int] | None = None  # that the host got: W for each request
    drafted: weakref.ref[Any] | None = None  # the verify input that the draft made
    lengths: weakref.ref[Any] | None = None  # the lengths that must be published
    verified: bool = False
    decided: bool = False  # the kernel of a greedy verify was seen
    sampled: bool = False  # the sampling of its verify was seen
    published: int = 0
    stashed: int = 0

    def __post_init__(self) -> None:
        self.written = Written(self.number, self.copies, self.requests)

    def left(self, reading: h.Reading) -> list[int | None]:
        """The value that each request's last step left for ``reading``. None: not known."""
        return [None] * len(self.rows) if self.last is None else self.last.left(reading.key)

    @property
    def rids(self) -> list[str]:
        return [str(r.rid) for r in self.requests]

    @property
    def judged(self) -> Rows:
        """The batch of the step, with the requests that go on now."""
        return Rows(self.rids, live_rows(self.requests))

    @property
    def verify(self) -> Verify:
        return Verify(
            self.width, self.depth, self.chain, self.simulated, self.local, self.worker.seeds
        )

    def check_result(self, accepted: Sequence[int]) -> Violation | None:
        """Hold the step against SGLang's books, which are as of its beginning.

        accepted: the accept length of each request, the bonus token included. A request that
        finished or was retracted since then is not judged.
        """
        values = self.copies.get() or {}
        if len(accepted) != len(self.requests):
            return check_accepted([n - 1 for n in accepted], len(self.requests), self.depth - 1)
        violation = self._check_shapes(values)
        if violation is not None:
            return violation
        rows, verify = self.judged, self.verify
        live = rows.live
        every = len(live) == len(self.requests)

        def some(numbers: Sequence[Any]) -> Sequence[Any]:
            return numbers if every else [numbers[i] for i in live]

        requests = some(self.requests)
        inputs = {k: some(values[k]) for k in (INDICES, LENS, BONUS) if k in values}
        impossible = check_accepted([n - 1 for n in some(accepted)], len(live), self.depth - 1)
        violation = at_rows(self._check_inputs(inputs, some, requests), live)
        violation = violation or self._check_hidden(rows, values)
        violation = violation or check_verify_input(rows, verify, values)
        violation = violation or check_verify_result(rows, verify, values)
        violation = violation or at_rows(impossible, live)
        if violation is None and self.tokens is not None:
            on_host = {h.HOST_LENS.key: accepted, h.HOST_TOKENS.key: self.tokens}
            violation = check_host(rows, verify, {**values, **on_host})
        return violation or at_rows(self._check_new(values, some, accepted), live)

    def check_fed(self) -> Violation | None:
        """Check the target's input, as far as its values are on the host by now."""
        return check_verify_input(self.judged, self.verify, self.copies.get() or {})

    def check_verified(self) -> Violation | None:
        """A length that no verify can accept ends the process where the draft selects by it."""
        values = self.copies.get() or {}
        if all(0 < n <= self.depth for n in values.get(h.RESULT_LENS.key, ())):
            return None
        return check_verify_result(self.judged, self.verify, values)

    def check_lengths(self, new: Any) -> Violation | None:
        """The lengths that were published are those of the forward's result."""
        own = self.lengths is not None and self.lengths() is new
        return check_publish(self.decode, self.verified, 0, own, own_rows=True)

    def check_kept(self, kept: Sequence[Sequence[int]]) -> Violation | None:
        """Each request is given the first of the tokens that the host got for it."""
        tokens, width = self.tokens, self.width
        if tokens is None or len(tokens) != width * len(kept):
            return None
        rows, given = self.judged, list(tokens)
        for row in rows.live:
            part = kept[row]
            if len(part) <= width:
                given[row * width : row * width + len(part)] = part
        return rows.check(SAMPLED, (h.HOST_TOKENS, tokens), (h.KEPT, given), width)

    def _check_hidden(self, rows: Rows, values: dict[str, list[int]]) -> Violation | None:
        """The draft got the hidden states that its request's last step had left."""
        left = self.left(h.LEFT_HIDDEN)
        return check_from_last(rows, STALE, h.LEFT_HIDDEN, h.HIDDEN, left, values)

    def _check_shapes(self, values: dict[str, list[int]]) -> Violation | None:
        """Each copied tensor must have one number for each request."""
        count = len(self.requests)
        for name, what in _NAMES.items():
            numbers = values.get(name)
            if numbers is not None and len(numbers) != count:
                if name == INDICES:
                    return check_same_rows(self.rows, numbers)
                return check_counts("seq-len", what, [0] * count, numbers)
        return None

    def _check_inputs(
        self, values: dict[str, Sequence[int]], some: Some, requests: Sequence[Any]
    ) -> Violation | None:
        """Check the values with which the step began, for the requests that go on."""
        indices, lens, bonus = values.get(INDICES), values.get(LENS), values.get(BONUS)
        violation = None
        if indices is not None:
            violation = check_same_rows(some(self.rows), indices)
        if violation is None and lens is not None:
            if self.lens is not None:
                violation = check_counts("seq-len", _NAMES[LENS], some(self.lens), lens)
            books = self.books(requests)
            if violation is None and books != lens:
                violation = self._check_books(books, lens, some, requests)
        if violation is None and bonus is not None:
            violation = self._check_bonus(bonus, some, requests)
        if violation is None and lens is not None:
            violation = check_allocated(
                [n + self.width for n in lens],
                some(self.allocated),
                f"for the {self.width} tokens that the verify writes",
            )
        return violation

    def _check_bonus(
        self, bonus: Sequence[int], some: Some, requests: Sequence[Any]
    ) -> Violation | None:
        """The draft begins with the token that the request's last step left, its last one."""
        rows = Rows([str(r.rid) for r in requests], range(len(requests)))
        left = some(self.left(h.LEFT_BONUS))
        last = [r.output_ids[-1] for r in requests]
        found = check_from_last(rows, BONUS_TOKEN, h.LEFT_BONUS, h.BONUS, left, {BONUS: bonus})
        if found is not None or last == bonus:
            return found
        if None not in left:
            return rows.check(SAMPLED, (h.LEFT_BONUS, bonus), (h.OUTPUT, last))
        reach = 2 * self.depth  # as many tokens as two verifies can accept
        return check_bonus(
            [str(r.rid) for r in requests],
            last,
            bonus,
            lambda i: requests[i].output_ids[-1 - reach : -1],
        )

    def _check_books(
        self, books: list[int], lens: Sequence[int], some: Some, requests: Sequence[Any]
    ) -> Violation | None:
        """The lengths differ from SGLang's books: find out which of the two is wrong.

        Where the request's last step left this length, the length is right.
        """
        left = some(self.left(h.NEW_LENS))
        if left == lens:
            return check_counts("bookkeeping", req_kv.COMMITTED, lens, books)
        rows = Rows([str(r.rid) for r in requests], range(len(requests)))
        found = check_from_last(rows, "seq-len", h.NEW_LENS, h.LENS, left, {LENS: lens})
        return found or check_counts("seq-len", "seq_lens", books, lens)

    def _check_new(
        self, values: dict[str, list[int]], some: Some, accepted: Sequence[int]
    ) -> Violation | None:
        """The lengths that were published for the next step."""
        lens, new = values.get(LENS), values.get(NEW_LENS)
        if lens is None or new is None:
            return None
        return check_advance("seq-len", "new_seq_lens", some(lens), some(new), some(accepted))


_NAMES = {
    INDICES: "future_indices",
    LENS: "seq_lens on the device",
    BONUS: "bonus_tokens",
    NEW_LENS: "new_seq_lens",
}


class PendingSteps:
    """The steps with a result that was not processed yet, by result."""

    def __init__(self) -> None:
        self._by_result: dict[int, tuple[weakref.ref[Any], PendingStep]] = {}

    def add(self, result: Any, step: PendingStep) -> None:
        for key, (ref, old) in list(self._by_result.items()):
            if ref() is None or len(self._by_result) >= MOST:
                old.copies.drop()
                del self._by_result[key]
        self._by_result[id(result)] = (weakref.ref(result), step)

    def take(self, result: Any) -> PendingStep | None:
        """The step that made this result, once. None if it was not followed."""
        ref, step = self._by_result.pop(id(result), (None, None))
        return step if ref is not None and ref() is result else None
