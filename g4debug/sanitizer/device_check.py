"""Shared by the tracers with a kernel: when a check runs, and how its records become findings.

A check is made at most once for each forward and key (a backend and a pool). In a CUDA graph each
captured check has a mailbox of the trap buffer for itself; outside of one, the checks of a key
follow each other in the same mailbox. After each step, and before its tokens leave, the host reads
the records that the kernel has left in pinned memory. A record that SGLang's own structures confirm
is reported.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from g4debug.findings.kinds import DeviceKind, FindingKind
from g4debug.findings.record import Evidence, Finding
from g4debug.findings.status import Tally
from g4debug.sanitizer.backend_state import BackendState
from g4debug.sanitizer.confirm import Unconfirmed
from g4debug.sanitizer.forward_snapshots import IN_FLIGHT, shared
from g4debug.sanitizer.reference_state import Truth
from g4debug.sanitizer.trap_buffer import Left, Record, TrapBuffer
from g4debug.tracers.base import Context

FIRST = 10  # from so many merged ones on, a line about them is logged; then at ten times as many
Key = tuple[int, str]  # id() of a backend, and what of it is checked
logger = logging.getLogger("g4debug")


@dataclass(slots=True, kw_only=True)
class Checked:
    """One check, with all that a description of its records needs.

    layer: the first layer of the forward that uses the object checked. batch: the ForwardBatch; in
    a captured CUDA graph, with static buffers. pool_name: "full" or "swa", the inner KV pool.
    """

    backend: Any
    layer: Any
    batch: Any
    pool_name: str
    page_size: int
    truth: Truth | None
    mailbox: int
    captured: bool


class Seen(Protocol):
    """One thing that a kernel saw. step, request: as in ``trap_buffer.Record``."""

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def step(self) -> int: ...

    @property
    def request(self) -> int: ...

    def full_page(self, page_size: int) -> int:
        """The page of the full pool that it is about, -1 if it is not known."""


C = TypeVar("C", bound=Checked)
S = TypeVar("S", bound=Seen)


class DeviceCheck(ABC, Generic[C, S]):
    """A tracer whose checks are ``C``, in which it sees ``S``.

    bad: the name of the things that its kernel counts, in the plural. lost: after an error of the
    device nothing more can be read or checked.
    """

    def __init__(self, context: Context, bad: str) -> None:
        self.context, self.bad = context, bad
        self.contain = context.settings.mode != "log"
        # In raise mode a finding ends the step. An unconfirmed one must not change an answer.
        self.repair = context.settings.mode == "contain"
        context.trap.reporters.append(self.report_only)
        self.trap: TrapBuffer | None = None
        self.lost = False
        self.snapshots = shared(context.recorder)
        self.backends = BackendState(context.ledger, self.snapshots)
        self.checks: dict[int, C] = {}  # by mailbox
        self.latest: dict[Key, C] = {}
        # By mailbox and step: the next check may be made before this one's findings are read.
        self._eager: dict[tuple[int, int], C] = {}
        self._eager_mailboxes: dict[Key, int] = {}
        self._memory: dict[tuple[Key, torch.dtype], list[torch.Tensor]] = {}
        self._views: dict[tuple[Key, torch.dtype], torch.Tensor] = {}  # taken of it last
        self._tallies: dict[str, Tally] = {}
        self._spoilt: set[int] = set()  # mailboxes that were reported as such
        self._next = FIRST

    def report_only(self) -> None:
        """Nothing that a kernel gets is corrected from now on.

        CUDA graphs may exist by now. Only ``watch`` comes here, and its guards in them ask.
        """
        self.contain = self.repair = False
        if self.trap is not None:
            self.trap.report_only()

    def follow(self) -> None:
        """Put hooks at the sites at which a step begins and ends."""
        self.context.before("scheduler.run_batch", self.before_run_batch)
        self.context.before("forward_batch.init_new", self.before_forward)
        self.context.after("scheduler.run_batch", self.after_run_batch)
        self.context.before("scheduler.process_result", self.before_process_result)
        self.context.before("scheduler.stream_output", self.before_stream_output)
        # In log mode the kernel gets the bad values, and the CUDA context may be dead by now. The
        # records are still in host memory.
        self.context.on_exception("scheduler.run_event_loop", self.poll)

    def before_run_batch(self, *args: Any, **kwargs: Any) -> None:
        self.snapshots.begin()

    def before_forward(self, *args: Any, **kwargs: Any) -> None:
        """``ForwardBatch.init_new(batch, model_runner)``, which may be given the class, too."""
        if self.snapshots.copy is None:
            return
        batch = kwargs.get("batch") or next(a for a in args if not isinstance(a, type))
        self.snapshots.take(batch, self.context.recorder.step)

    def before_process_result(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if self.snapshots.copy is not None:
            self.snapshots.processing(batch)

    def after_run_batch(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self.snapshots.returned(scheduler)
        self.poll()
        if self.trap is not None and not self.lost:
            self.count(1, "steps")
        return result

    def before_stream_output(self, *args: Any, **kwargs: Any) -> None:
        # SGLang has waited for the step's tokens, so what was seen in that forward is visible now.
        # In raise mode no token of a bad step leaves the process.
        self.poll()

    # --- a check is made -------------------------------------------------------------------

    def mailbox(self, key: Key, tensor: torch.Tensor) -> tuple[int, bool]:
        """The mailbox of the next check of ``key``, and whether a CUDA graph is being captured.

        tensor: one that the check reads.
        """
        if self.trap is None:
            self.trap = TrapBuffer(tensor.device)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.trap.new_mailbox(), True
        mailbox = self._eager_mailboxes.setdefault(key, 0) or self.trap.new_mailbox()
        self._eager_mailboxes[key] = mailbox
        return mailbox, False

    def has_truth(self, backend: Any, captured: bool) -> bool:
        """True if there is a truth for the next forward of a backend.

        There is none for a forward that the scheduler did not launch. SGLang runs some with dummy
        requests, whose rows are those of nobody, or of others: to warm up and to capture CUDA
        graphs, before the first batch or, where it captures anew, between two. A captured check
        runs in the replays.
        """
        if captured:
            return self.backends.judges(backend)
        by_copy = self.snapshots.copy is not None
        strange = by_copy and self.snapshots.step != self.context.recorder.step
        return self.snapshots.running and not strange and self.backends.judges(backend)

    def buffer(self, key: Key, like: torch.Tensor, dtype: torch.dtype, spare: int) -> torch.Tensor:
        """Contiguous memory of the shape of ``like``, with ``spare`` elements behind it.

        There is one buffer for each key, and a larger one when that is needed. A captured CUDA
        graph keeps pointing at the buffer that it was captured with, so buffers that became too
        small are kept.
        """
        view = self._views.get((key, dtype))
        if view is not None and view.shape == like.shape:
            return view
        kept, n = self._memory.setdefault((key, dtype), []), like.numel()
        if not kept or kept[-1].numel() < n + spare:
            kept.append(torch.zeros(n + spare, dtype=dtype, device=like.device))
        view = self._views[key, dtype] = kept[-1][:n].view(like.shape)
        return view

    def launched(self, key: Key, checked: C, on_gpu: bool, n: int, what: str) -> None:
        """The kernel of a check was launched. n, what: how many things it checks; their name."""
        self.latest[key] = self.checks[checked.mailbox] = checked
        if not checked.captured and self.snapshots.copy is not None:
            self._eager[checked.mailbox, self.snapshots.step] = self.remembered(checked)
            while len(self._eager) > 4 * IN_FLIGHT:
                del self._eager[next(iter(self._eager))]
        if checked.captured:
            self.context.status.captured.add(checked.batch.forward_mode.name)
        self.count(n, f"{what} captured in CUDA graphs" if checked.captured else what)
        if not on_gpu:
            self.poll()

    def remembered(self, checked: C) -> C:
        """The part of a check that is kept for as long as its forward may be in flight."""
        return checked

    def count(self, n: int, what: str) -> None:
        """Count the checks of this step. This runs in every layer, so it calls nobody."""
        tally = self._tallies.get(what)
        if tally is None:
            tally = self._tallies[what] = self.context.status.tally(what)
        tally.count += n
        tally.step = self.context.recorder.step

    # --- what was seen is reported -----------------------------------------------------------

    def poll(self) -> None:
        """Report new records. If there are none, this is one read of host memory."""
        if self.trap is not None and not self.lost and self.trap.tripped:
            self.report(self.trap)

    def report(self, trap: TrapBuffer) -> None:
        """Take the records from the trap buffer, and report those that are confirmed."""
        found = []
        for left in trap.take():
            eager = self._eager.get((left.mailbox, left.record.step))
            checked = self.checks.get(left.mailbox) if eager is None else eager
            seen = self._confirmed(checked, self.seen(checked, left.record))
            if seen is None:
                continue
            try:
                found.append(self.describe(checked, seen, left))
            except Exception:
                # A bug of ours must not hide the finding.
                name = self.context.tracer_id
                logger.exception("g4debug: %s: a finding cannot be described in full", name)
                seen = self.seen(None, left.record)
                found.append((self.bare(checked, seen, left), Evidence()))
        self._give_account(trap)
        for finding, evidence in found:  # in raise mode the first one raises
            self.context.trap.report(finding, evidence)

    def _confirmed(self, checked: C | None, seen: S) -> S | None:
        """What to report of a sighting. None for nothing; the log then says why."""
        name, ledger, record = self.context.tracer_id, self.context.ledger, seen.kind.record
        early = seen.step >= 0 and self.snapshots.is_void(seen.step, seen.request)
        what = self.words(checked, seen)
        if early and not record.ended:
            logger.info(
                "g4debug: %s: nothing is reported of %s, because its request had ended before the "
                "result of step %d was looked at",
                name,
                what,
                seen.step,
            )
            return None
        if checked is None or not _rests_on_ledger(record, checked.truth):
            return seen
        try:
            return self.confirm(checked, seen)
        except Unconfirmed as e:
            if e.harmless or ledger is None:
                logger.warning("g4debug: %s: nothing is reported of %s, because %s", name, what, e)
            elif record.suspicion and ledger.owners is not None:
                ledger.owners.doubt(e.page, str(e))
            elif e.page > 0 and not ledger.broken:
                ledger.doubt("full", np.array([e.page]), f"{what}: {e}")
            else:
                logger.warning("g4debug: %s: nothing is reported of %s, because %s", name, what, e)
        except Exception as e:
            # A bug of ours costs this finding, and not those about other pages.
            logger.warning("g4debug: %s: nothing is reported of %s, because %s", name, what, e)
            if ledger is not None:
                page = seen.full_page(checked.page_size)
                ledger.unasked("full", np.array([page] if page > 0 else [], np.int64), what, e)
        return None

    def _give_account(self, trap: TrapBuffer) -> None:
        """Log how many bad things are in no finding, and which mailboxes are unusable."""
        for mailbox in trap.spoilt - self._spoilt:
            self._spoilt.add(mailbox)
            self.context.limit(
                f"the records in mailbox {mailbox} of its trap buffer are not read",
                "somebody else wrote into that host memory",
            )
        try:
            merged = trap.merged()
        except RuntimeError as e:
            self.lost = True
            self.context.off(f"the device is lost: {e}")
            return
        if merged >= self._next:
            self._next = 10 ** len(str(merged))
            logger.warning(
                "g4debug: %s: %d %s so far are in no finding of their own: they were seen before "
                "the host had read the last one",
                self.context.tracer_id,
                merged,
                self.bad,
            )

    @abstractmethod
    def seen(self, checked: C | None, record: Record) -> S:
        """The sighting that a record describes. Must not fail, whatever the record holds."""

    @abstractmethod
    def words(self, checked: C | None, seen: S) -> str:
        """The sighting in words, for a line of the log."""

    @abstractmethod
    def confirm(self, checked: C, seen: S) -> S:
        """``seen``, with the answers of SGLang's own structures. May wait for the device.

        Called if the truth rests on the ledger. Raises Unconfirmed if those structures disagree.
        """

    @abstractmethod
    def describe(self, checked: C | None, seen: S, left: Left) -> tuple[Finding, Evidence]:
        """The finding. checked: None if no check belongs to the record."""

    @abstractmethod
    def bare(self, checked: C | None, seen: S, left: Left) -> Finding:
        """The finding, made from the record alone. checked: gives the place, None if not known."""


def _rests_on_ledger(kind: FindingKind, truth: Truth | None) -> bool:
    """True if only the ledger says that this is wrong."""
    if truth is None or truth.shadow is None:
        return False
    return bool(kind.confirmed_by) and (truth.swa or not kind.in_swa)
