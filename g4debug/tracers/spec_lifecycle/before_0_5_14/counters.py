"""Follows SGLang's counters of each request in a speculative step.

:class:`Counting` follows the counters on the host, :class:`DeviceLengths` the lengths on the
device.
"""

from __future__ import annotations

from typing import Any

import torch

from g4debug.tracers.spec_lifecycle.check import Violation, check_advance, check_counts

NAMES = ("output_ids", "kv_committed_len", "spec_verify_ct")
Counts = list[tuple[int, int, int]]  # of each request, as in NAMES


class Counting:
    """Watches the counters from the start of a verify until the output of its step is sent."""

    def __init__(self) -> None:
        self._before: tuple[Counts, list[int]] | None = None  # before the verify
        self._rids: list[str] = []  # the requests with output that was not sent yet
        self._after: Counts = []  # after the verify

    def begin(self, batch: Any) -> None:
        """``batch``: a ScheduleBatch that is about to be verified."""
        self._before = (_counts(batch.reqs), batch.seq_lens_cpu.tolist())

    def cancel(self) -> None:
        """Forget a verify that was begun."""
        self._before = None

    @property
    def begun(self) -> bool:
        """True between :meth:`begin` and the next :meth:`cancel`."""
        return self._before is not None

    def check_verify(
        self, worker: Any, batch: Any, correct: list[int], live: list[int]
    ) -> Violation | None:
        """All counters must have gone forward by the accepted tokens. live: rows that go on."""
        assert self._before is not None
        before, lens = self._before
        after, lens_after = _counts(batch.reqs), batch.seq_lens_cpu.tolist()
        self._rids, self._after = [r.rid for r in batch.reqs], after
        by = [n + 1 for n in correct]
        if len(before) != len(by) or after != [
            (output + n, committed + n, verified + 1)
            for (output, committed, verified), n in zip(before, by, strict=True)
        ]:
            columns = zip(NAMES, _columns(before), _columns(after), strict=True)
            for (name, old, new), steps in zip(columns, (by, by, [1] * len(by)), strict=True):
                violation = check_advance("bookkeeping", name, old, new, steps)
                if violation is not None:
                    return violation
        if worker.topk > 1:  # then SGLang does not advance the lengths of finished requests
            lens, lens_after = [lens[i] for i in live], [lens_after[i] for i in live]
            by = [by[i] for i in live]
        return check_advance("seq-len", "seq_lens_cpu", lens, lens_after, by)

    def check_since(self, reqs: Any) -> Violation | None:
        """Nothing may have been counted again since the verify."""
        if not self._rids:
            return None
        now = _counts(reqs)
        if now == self._after:
            return None
        then = dict(zip(self._rids, self._after, strict=True))
        for row, (request, counts) in enumerate(zip(reqs, now, strict=True)):
            was = then.get(request.rid)
            if was is not None and was != counts:
                i = next(i for i in range(len(NAMES)) if was[i] != counts[i])
                off = counts[i] - was[i]
                got = f"{NAMES[i]} = {counts[i]} ({off:+d} after the verify)"
                return Violation("bookkeeping", f"{NAMES[i]} = {was[i]}", got, row, NAMES[i], off)
        return None

    def sent(self) -> None:
        """The output was sent, so nothing is watched until the next verify."""
        self._rids = []


def _counts(reqs: Any) -> Counts:
    return [(len(r.output_ids), r.kv_committed_len, r.spec_verify_ct) for r in reqs]


def _columns(counts: Counts) -> list[list[int]]:
    """All of the first counter, then of the second and of the third."""
    return [[of_one[i] for of_one in counts] for i in range(len(NAMES))]


class DeviceLengths:
    """Compares ``batch.seq_lens`` on the device with the host's copy, without waiting for it.

    Compares the lengths with which the draft begins. The copy to pinned memory is started while
    the target's forward runs, because then it costs the step nothing. Nobody changes the lengths
    until then. The copy is read after the verify, which has waited for the same stream anyway. On a
    CPU the two are compared at once.
    """

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._begun: tuple[torch.Tensor, list[int]] | None = None
        self._expected: list[int] | None = None

    def begin(self, seq_lens: torch.Tensor, expected: list[int]) -> Violation | None:
        """A draft begins. seq_lens: integer [requests]. expected: the lengths on the host."""
        if not seq_lens.is_cuda:
            return _compare(expected, seq_lens.tolist())
        self._begun = seq_lens, expected
        return None

    def start(self) -> None:
        """The target's forward runs now: start to copy the last draft's lengths."""
        if self._begun is None:
            return
        (seq_lens, expected), self._begun = self._begun, None
        if self._expected is not None:
            return  # nobody has looked at the last copy, which may still be running
        size = seq_lens.shape[0]
        if self._pinned is None or self._pinned.shape[0] < size or self._event is None:
            self._pinned = torch.empty(max(1024, 2 * size), dtype=torch.int64, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned[:size].copy_(seq_lens, non_blocking=True)
        self._event.record()
        self._expected = expected

    def look(self) -> Violation | None:
        """The result of the last :meth:`start`, if it has arrived."""
        if self._expected is None or self._pinned is None or self._event is None:
            return None
        if not self._event.query():  # type: ignore[no-untyped-call]
            return None
        expected, self._expected = self._expected, None
        return _compare(expected, self._pinned[: len(expected)].tolist())


def _compare(expected: list[int], got: list[int]) -> Violation | None:
    return check_counts("seq-len", "seq_lens on the device", expected, got)
