"""What a verify step of speculative decoding v2 was launched with, until its result is processed.

With overlap scheduling the next step is launched first. Then SGLang knows on the host what was
accepted, and its own books (``kv_committed_len``, ``output_ids``) have come to the beginning of
this step. So the values that the step had on the device are held against them there, before any of
its tokens leaves.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from g4debug.hooking import req_kv
from g4debug.tracers.spec_lifecycle.check import (
    Violation,
    at_rows,
    check_accepted,
    check_advance,
    check_allocated,
    check_bonus,
    check_counts,
    check_same_rows,
)
from g4debug.tracers.spec_lifecycle.copies import MOST, Copies
from g4debug.tracers.spec_lifecycle.future_rows import goes_on

INDICES, LENS, BONUS, NEW_LENS = "indices", "lens", "bonus", "new lens"  # what is copied


@dataclass
class Launch:
    """One forward of a batch that is not idle.

    rows: of ``req_to_token``, one for each request. indices: the tensor of these rows on the
    device. lens: what SGLang has on the host, None if it has none there. depth: the most tokens
    that a verify can accept. width: for how many tokens a verify writes KV.
    """

    step: int
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
    drafted: weakref.ref[Any] | None = None  # the verify input that the draft made
    lengths: weakref.ref[Any] | None = None  # the lengths that must be published
    verified: bool = False
    published: int = 0
    stashed: int = 0
    rids: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        self.rids = tuple(str(r.rid) for r in self.requests)

    @property
    def live(self) -> list[int]:
        """The rows of the batch whose requests have not finished, and were not retracted."""
        return [i for i, r in enumerate(self.requests) if goes_on(r)]

    def check_result(self, accepted: Sequence[int]) -> Violation | None:
        """Hold the step against SGLang's books, which are as of its beginning.

        accepted: the accept length of each request, the bonus token included. A request that
        finished or was retracted since the launch is not judged.
        """
        values = self.copies.get()
        if values is None:
            values = {}
        if len(accepted) != len(self.requests):
            return check_accepted([n - 1 for n in accepted], len(self.requests), self.depth - 1)
        live = self.live
        requests = [self.requests[i] for i in live]

        def some(numbers: Sequence[int]) -> list[int]:
            return [numbers[i] for i in live]

        return at_rows(
            self._check_inputs(values, live, requests)
            or check_accepted([accepted[i] - 1 for i in live], len(live), self.depth - 1)
            or self._check_new(values, some(accepted), live),
            live,
        )

    def _check_inputs(
        self, values: dict[str, list[int]], live: list[int], requests: list[Any]
    ) -> Violation | None:
        """What the step began with."""
        count = len(self.requests)
        for name, numbers in values.items():
            if len(numbers) != count and name != INDICES:
                return check_counts("seq-len", _NAMES[name], [0] * count, numbers)
        indices, lens, bonus = values.get(INDICES), values.get(LENS), values.get(BONUS)
        violation = None
        if indices is not None:
            violation = (
                check_same_rows(self.rows, indices)
                if len(indices) != count
                else check_same_rows([self.rows[i] for i in live], [indices[i] for i in live])
            )
        if violation is None and lens is not None:
            on_device = [lens[i] for i in live]
            if self.lens is not None:
                expected = [self.lens[i] for i in live]
                violation = check_counts("seq-len", _NAMES[LENS], expected, on_device)
            committed = [req_kv.committed(r) for r in requests]
            violation = violation or check_counts("seq-len", "seq_lens", committed, on_device)
        if violation is None and bonus is not None:
            outputs = [r.output_ids for r in requests]
            violation = check_bonus(
                [self.rids[i] for i in live],
                [int(o[-1]) for o in outputs],
                [bonus[i] for i in live],
                [list(o[-1 - 2 * self.depth : -1]) for o in outputs],
            )
        if violation is None and lens is not None:
            violation = check_allocated(
                [lens[i] + self.width for i in live],
                [self.allocated[i] for i in live],
                f"for the {self.width} tokens that the verify writes",
            )
        return violation

    def _check_new(
        self, values: dict[str, list[int]], accepted: list[int], live: list[int]
    ) -> Violation | None:
        """The lengths that were published for the next step."""
        lens, new = values.get(LENS), values.get(NEW_LENS)
        if lens is None or new is None:
            return None
        before, after = [lens[i] for i in live], [new[i] for i in live]
        return check_advance("seq-len", "new_seq_lens", before, after, accepted)


_NAMES = {LENS: "seq_lens on the device", BONUS: "bonus_tokens", NEW_LENS: "new_seq_lens"}


class Launches:
    """The launches whose results were not processed yet, by result."""

    def __init__(self) -> None:
        self._by_result: dict[int, tuple[weakref.ref[Any], Launch]] = {}

    def add(self, result: Any, launch: Launch) -> None:
        for key, (ref, old) in list(self._by_result.items()):
            if ref() is None or len(self._by_result) >= MOST:
                old.copies.drop()
                del self._by_result[key]
        self._by_result[id(result)] = (weakref.ref(result), launch)

    def take(self, result: Any) -> Launch | None:
        """The launch that made this result, once. None if it was not followed."""
        ref, launch = self._by_result.pop(id(result), (None, None))
        return launch if ref is not None and ref() is result else None
