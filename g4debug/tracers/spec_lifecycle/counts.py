"""What SGLang counts of each request in a speculative step, followed on the host."""

from __future__ import annotations

from typing import Any

from g4debug.tracers.spec_lifecycle.check import Violation, check_advance

NAMES = ("output_ids", "kv_committed_len", "spec_verify_ct")
Counts = tuple[list[int], list[int], list[int]]


class Counting:
    """From the start of a verify until the output of its step is sent."""

    def __init__(self) -> None:
        self._before: tuple[Counts, list[int]] | None = None  # as the verify finds them
        self._rids: list[str] = []  # of the requests whose output was not sent yet
        self._after: Counts = ([], [], [])  # as the verify leaves them

    def begin(self, batch: Any) -> None:
        """``batch``: a ScheduleBatch that is about to be verified."""
        self._before = (_counts(batch.reqs), batch.seq_lens_cpu.tolist())

    def cancel(self) -> None:
        self._before = None

    @property
    def begun(self) -> bool:
        return self._before is not None

    def check_verify(
        self, worker: Any, batch: Any, correct: list[int], live: list[int]
    ) -> Violation | None:
        """Everything went forward by what was accepted. ``live``: rows that go on."""
        assert self._before is not None
        before, lens = self._before
        after, lens_after = _counts(batch.reqs), batch.seq_lens_cpu.tolist()
        self._rids, self._after = [r.rid for r in batch.reqs], after
        by = [n + 1 for n in correct]
        once = [1] * len(by)
        for name, old, new, steps in zip(NAMES, before, after, (by, by, once), strict=True):
            violation = check_advance("bookkeeping", name, old, new, steps)
            if violation is not None:
                return violation
        if worker.topk > 1:  # there SGLang does not advance the lengths of what finished
            lens, lens_after = [lens[i] for i in live], [lens_after[i] for i in live]
            by = [by[i] for i in live]
        return check_advance("seq-len", "seq_lens_cpu", lens, lens_after, by)

    def check_since(self, reqs: Any) -> Violation | None:
        """Nobody has counted anything again since the verify."""
        if not self._rids:
            return None
        now = _counts(reqs)
        if now == self._after:
            return None
        then = dict(zip(self._rids, zip(*self._after, strict=True), strict=True))
        for row, (request, counts) in enumerate(zip(reqs, zip(*now, strict=True), strict=True)):
            was = then.get(request.rid)
            if was is not None and was != counts:
                i = next(i for i in range(len(NAMES)) if was[i] != counts[i])
                got = f"{NAMES[i]} = {counts[i]} ({counts[i] - was[i]:+d} after the verify)"
                return Violation("bookkeeping", f"{NAMES[i]} = {was[i]}", got, row, NAMES[i])
        return None

    def sent(self) -> None:
        self._rids = []


def _counts(reqs: Any) -> Counts:
    return (
        [len(r.output_ids) for r in reqs],
        [r.kv_committed_len for r in reqs],
        [r.spec_verify_ct for r in reqs],
    )
