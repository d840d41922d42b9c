"""The page ledger: who holds each KV page and what happened to it, kept on the host.

:mod:`g4debug.ledger.hooks` feeds it from SGLang's allocators. An event costs O(pages of the
event). On a GPU the indices are on the device. Those of an allocation are copied to pinned memory
without waiting, and entered when the copy has arrived (:meth:`Ledger.settle`). A free waits for
the device, as SGLang's own free does (``torch.unique``). For kernels there is a copy on the
device, the shadow (:mod:`g4debug.ledger.shadow`).

Without overlap scheduling the GPU waits while the host prepares a step, and then the host waits for
the GPU. So what a step allocated is gathered, and copied and entered in the time in which the
target's forward runs (:meth:`Ledger.meanwhile`): there it costs a server nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from g4debug.findings.record import PageEvent
from g4debug.findings.status import LEDGER
from g4debug.hooking.hooks import Isolated
from g4debug.ledger import shadow as shadows
from g4debug.ledger import snapshot
from g4debug.ledger.host import Pages as Pages
from g4debug.ledger.owners import Owners
from g4debug.ledger.shadow import FREE, HELD

if TYPE_CHECKING:
    from g4debug.findings.steps import Recorder
    from g4debug.ledger.holders import Holders

DEPTH = 8  # events kept per page
KEPT = 16_384  # events kept of all pages together
TAILS = 4096  # requests whose last page is known
SHOWN = 8  # pages named in an event
TAIL = 256  # last events of all pages that go into a dump
NOT_YET = -(1 << 62)  # the value of a staged word that the device has not written yet
STAGING = 1 << 20  # int64 words of pinned memory for indices on their way to the host


@dataclass
class PoolLedger:
    """The pages of one pool. ``pages`` includes the reserved page 0.

    The arrays have one entry for each page:
    held: it was handed out and not freed yet.
    ever: it was handed out at least once.
    owner: rid of the last request that it was handed out for, '' if not known.
    position: position of the page's first token in that request, -1 if not known.
    partner: the SWA page of a full page, or the full page of a SWA page; 0 if there is none, -1
        if not known.

    tails: rid -> the last page of the request's sequence.
    """

    name: str
    pages: int
    page_size: int
    held: np.ndarray[Any, np.dtype[np.bool_]] = field(init=False)
    ever: np.ndarray[Any, np.dtype[np.bool_]] = field(init=False)
    owner: np.ndarray[Any, np.dtype[np.object_]] = field(init=False)
    position: Pages = field(init=False)
    partner: Pages = field(init=False)
    tails: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.owner = np.full(self.pages, "", dtype=object)
        self.ever = np.zeros(self.pages, dtype=np.bool_)
        self._ring = np.full((self.pages, DEPTH), -1, dtype=np.int64)
        self._turn = np.zeros(self.pages, dtype=np.int64)
        self.forget()

    def forget(self) -> None:
        """All pages are free again, because the allocator was cleared. Their histories stay."""
        self.held = np.zeros(self.pages, dtype=np.bool_)
        self.position = np.full(self.pages, -1, dtype=np.int64)
        self.partner = np.zeros(self.pages, dtype=np.int64)

    def inside(self, pages: Pages) -> Pages:
        """Those of ``pages`` that are in this pool, without the reserved page 0."""
        return pages[(pages > 0) & (pages < self.pages)]

    def not_held(self, pages: Pages) -> Pages:
        """Those of ``pages`` that are not held pages of this pool, in the order given."""
        if not len(pages):
            return pages
        if self.held.take(pages, mode="clip").all() and pages.max() < len(self.held):
            return pages[:0]  # take() clips negative pages to page 0, which is never held
        inside = (pages > 0) & (pages < len(self.held))
        held = np.zeros(len(pages), dtype=np.bool_)
        held[inside] = self.held[pages[inside]]
        return pages[~held]

    def touch(self, pages: Pages | int, serial: int) -> None:
        """Note that ``serial`` is the number of the last event of these pages of this pool."""
        self._ring[pages, self._turn[pages] % DEPTH] = serial
        self._turn[pages] += 1

    def pair(self, full: Pages, swa_pool: PoolLedger, swa: Pages) -> None:
        """``swa[i]`` is the SWA page of this pool's page ``full[i]``. Bad indices are skipped."""
        sound = (full > 0) & (full < self.pages) & (swa > 0) & (swa < swa_pool.pages)
        if not sound.all():
            full, swa = full[sound], swa[sound]
        before = swa_pool.partner[swa]  # a SWA page that goes over to another full page
        moved = (before > 0) & (before != full)
        if moved.any():
            left = before[moved]
            self.partner[left[self.partner[left] == swa[moved]]] = 0
        self.partner[full] = swa
        swa_pool.partner[swa] = full

    def ends_in(self, request: str, page: int) -> None:
        """Note the last page of a request's sequence. The latest ``TAILS`` requests are kept.

        Of a page that the pool does not have, which a broken allocator gave, nothing is noted.
        """
        self.tails.pop(request, None)
        if not 0 < page < self.pages:
            return
        self.tails[request] = page
        if len(self.tails) > TAILS:
            del self.tails[next(iter(self.tails))]

    def serials(self, page: int) -> list[int]:
        """Serial numbers of the page's last events, oldest first."""
        return sorted(int(n) for n in self._ring[page] if n >= 0)


# Called with (pool, event, all pages of the event) before the event changes the ledger. If pages
# are about to be freed, a listener may return the pages to free instead.
Listener = Callable[[PoolLedger, PageEvent, Pages], "Pages | None"]
# Called when SGLang asks to free full pages, which may happen later. It may return a function that
# judges them (:data:`Judge`), if it has something to say about this call.
Asked = Callable[[], "Judge | None"]
# Called with the pool, the event and its pages before they are freed, or, where their indices have
# to come from a device, soon after. Returns those that must not be freed.
Judge = Callable[[PoolLedger, PageEvent, Pages], Pages]


@dataclass(slots=True)
class _Pending:
    """Indices on their way to the host, and what to do with them there.

    words: where they are in the staging buffers. arrived: the event (``torch.cuda.Event``) after
    which they are in the host's; those that were sent together share it.
    """

    words: slice
    enter: Callable[[Pages], None]
    step: int  # to which what happened to them belongs, however late they arrive
    arrived: Any = None


class Ledger:
    """The pages of the allocators in this process.

    batch: the ScheduleBatch that is being prepared or run, or was run last.
    allocating: the batch whose requests get what is allocated now. None outside of the calls in
        which SGLang prepares or runs a batch: then it is not known for whom pages are.
    holders: who holds the pages according to SGLang's own structures.
    requests: rid -> SGLang's Req.
    losing_swa: while SWA pages are being freed, the full pages that they belong to.
    expected_swa: the SWA pages that those full pages had by the ledger, sorted.
    parted: SWA page -> (the full page that it belonged to, whether it is freed alone), from the
        moment in which it is taken out of the mapping until it is free.
    mapped: while a wrong mapping is entered, full page -> (its SWA page, the mapping's SWA page).
    serial: the number of the next event.
    gathers: what is posted is sent while the next forward runs (:meth:`meanwhile`), and not before
        it. Whichever it is, all that was posted until then is sent together.
    broken: why the ledger was given up, '' while it is sound. Nothing may be concluded from a
        ledger that was given up.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.pools: dict[str, PoolLedger] = {}
        self.listeners: list[Listener] = []
        self.asked: list[Asked] = []
        self.batch: Any = None
        self.allocating: Any = None
        self.holders: Holders | None = None
        self.requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.losing_swa: Pages | None = None
        self.expected_swa: Pages | None = None
        self.parted: dict[int, tuple[int, bool]] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        # Tracers for which a free is entered before it happens, even if that has to wait.
        self.judges_first: set[str] = set()
        self.broken = ""
        self._hooks: list[Isolated] = []  # which must not run any more once it is broken
        self.status = recorder.status.part(LEDGER)
        self.shadow: torch.Tensor | None = None  # of the full pool, see ledger/shadow.py
        self.owners: Owners | None = None  # of the full pool, see ledger/owners.py
        self._log: deque[PageEvent] = deque(maxlen=KEPT)
        self.serial = 0  # number of the next event
        self._events = self.status.tally("events")
        self.gathers = False
        self._unsent: list[_Pending] = []
        self._ready: Any = None  # an event after which what is unsent can be read on any stream
        self._aside: Any = None  # the stream on which that is done
        self._pending: deque[_Pending] = deque()
        self._step: int | None = None  # of what is entered now, if it was posted earlier
        self._before = 0  # how many of them are from before that event
        self._stream: Any = None  # on which what is unsent was posted; None on a CPU
        self._raw = -1  # the same as CUDA's own pointer; -1 on a CPU
        self._device: torch.Tensor | None = None  # what was posted, on the device
        self._staging: torch.Tensor | None = None  # the same, in pinned memory
        self._staged: Pages = np.empty(0, dtype=np.int64)  # the same memory, as an array
        self._idle: list[Any] = []  # events that have happened, to be recorded again
        self._used = 0  # words of _staging that are taken
        self._undo: dict[str, list[tuple[bool, Pages]]] = {}  # what to undo, by pool, for restore

    # --- what happened -------------------------------------------------------------------

    def history(self, pool: str, page: int) -> tuple[PageEvent, ...]:
        """The last events of one page, oldest first. In each, the page comes first."""
        ledger = self.pools.get(pool)
        if ledger is None or not 0 <= page < ledger.pages:
            return ()
        oldest = self.serial - len(self._log)
        events = (self._log[n - oldest] for n in ledger.serials(page) if n >= oldest)
        return tuple(
            replace(e, pages=(page, *(p for p in e.pages if p != page))[:SHOWN]) for e in events
        )

    def last_events(self, count: int = TAIL) -> tuple[PageEvent, ...]:
        """The last events of all pages, oldest first."""
        return tuple(self._log)[-count:]

    def owner(self, pool: str, page: int) -> str:
        """rid of the last request that a page was handed out for, '' if not known."""
        ledger = self.pools.get(pool)
        inside = ledger is not None and 0 <= page < ledger.pages
        return str(ledger.owner[page]) if ledger is not None and inside else ""

    # --- what happens --------------------------------------------------------------------

    def enter(
        self,
        pool: PoolLedger,
        kind: str,
        pages: Pages,
        *,
        holds: bool | None,
        request: str = "",
        positions: Pages | list[int] | None = None,
        caller: str = "",
        note: str = "",
    ) -> Pages:
        """Enter one event. ``holds``: whether the pages are held after it, None for no change.

        The listeners are called first, while the ledger still has the state before the event.
        Returns the pages of the event, which a listener may have corrected if they are freed.
        If a listener raises an exception, that goes on to the caller. A free is then not entered,
        because it will not happen. A hand-out is entered, because it has happened.
        """
        event = self.event(pool, kind, pages, request, caller, note)
        happened = holds is not False
        try:
            for listener in self.listeners:
                instead = listener(pool, event, pages)
                if instead is not None:
                    pages = instead
            happened = True
        finally:
            if happened:
                self._log.append(event)
                self._apply(pool, pages, holds, request, positions)
                self.serial += 1
                self._events.count += 1
                self._events.step = event.step
        return pages

    def event(
        self,
        pool: PoolLedger,
        kind: str,
        pages: Pages,
        request: str = "",
        caller: str = "",
        note: str = "",
    ) -> PageEvent:
        """An event of now, or of the step in which what is entered now was posted."""
        return PageEvent(
            step=self.recorder.event_step if self._step is None else self._step,
            kind=kind,
            pool=pool.name,
            pages=tuple(pages[:SHOWN].tolist()),
            count=len(pages),
            request=request,
            caller=caller,
            note=note,
        )

    def _apply(
        self,
        pool: PoolLedger,
        pages: Pages,
        holds: bool | None,
        request: str,
        positions: Pages | list[int] | None,
    ) -> None:
        inside: Any = pool.inside(pages)
        known: Any = -1 if positions is None or len(inside) != len(pages) else positions
        if len(pages) == len(inside) == 1:  # ten times as fast as arrays of one element
            inside, known = int(pages[0]), -1 if positions is None else int(positions[0])
        pool.touch(inside, self.serial)
        if holds is None:
            return
        if pool.name in self._undo:
            which = np.atleast_1d(np.asarray(inside))
            self._undo[pool.name].append((not holds, which[pool.held[which] != holds]))
        pool.held[inside] = holds
        if holds:
            if request and len(pages):
                pool.ends_in(request, int(pages[-1]))
            pool.ever[inside] = True
            pool.owner[inside] = request
            pool.position[inside] = known
            pool.partner[inside] = 0

    def backup(self, pool: PoolLedger) -> None:
        """The allocator saved its state, so remember how to undo what follows."""
        self.settle(wait=True)
        self._undo[pool.name] = []

    def restore(self, pool: PoolLedger) -> None:
        """The allocator went back to its saved state, so undo what happened since."""
        self.settle(wait=True)
        for held, pages in reversed(self._undo.pop(pool.name, [])):
            pool.held[pages] = held
            pool.partner[pages] = -1  # SGLang does not put its mapping back
            if self.shadow is not None and pool.name == "full":
                indices = torch.from_numpy(pages * pool.page_size).to(self.shadow.device)
                shadows.mark(self.shadow, indices, pool.page_size, HELD if held else FREE)

    # --- indices on their way to the host --------------------------------------------------

    @staticmethod
    def is_far(indices: torch.Tensor) -> bool:
        """True if reading these indices needs a copy from a device."""
        return bool(indices.is_cuda)

    @property
    def late(self) -> bool:
        """True while something is entered that happened some time ago."""
        return self._step is not None

    def post(
        self,
        indices: torch.Tensor,
        enter: Callable[[Pages], None],
        mapping: torch.Tensor | None = None,
        page_size: int = 0,
        value: int = FREE,
        unless_free: bool = False,
    ) -> None:
        """Call ``enter`` with the values of an index tensor: at once on a CPU, later on a GPU.

        The values are those of now, whatever happens to the tensor until then. indices: int32 or
        int64 [n]. mapping: SGLang's; then ``enter`` gets [2 n] values, the indices and then what
        the mapping says of them. page_size: how many indices a page of the full pool has, if the
        shadow is to learn of them, 0 if not; see :func:`snapshot.take` for the rest.
        """
        of = mapping, self.shadow if page_size else None, page_size, value, unless_free
        count = indices.numel() if mapping is None else 2 * indices.numel()
        if not self.is_far(indices) or count > STAGING:
            if self.is_far(indices):
                self.settle(wait=True)
            taken = torch.empty(count, dtype=torch.int64, device=indices.device)
            snapshot.take(indices, taken, *of)
            enter(taken.cpu().numpy())
            return
        self._on_current_stream(indices)
        if self._device is None:
            self._device = torch.empty(STAGING, dtype=torch.int64, device=indices.device)
            self._staging = torch.empty(STAGING, dtype=torch.int64, pin_memory=indices.is_cuda)
            self._staged = self._staging.numpy()
        if self._used + count > STAGING:
            self.settle(wait=True)
            self._used = 0
        words = slice(self._used, self._used + count)
        self._used += count
        snapshot.take(indices, self._device[words], *of)
        self._unsent.append(_Pending(words, enter, self.recorder.event_step))

    def _on_current_stream(self, indices: torch.Tensor) -> None:
        """What is posted next is posted on the current stream. Send what was posted on another."""
        device = indices.get_device()
        raw = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else -1
        if raw == self._raw:  # a tenth of the time of asking for the stream itself
            return
        if self._unsent:
            self._send()
        self._raw = raw
        self._stream = torch.cuda.current_stream(device) if device >= 0 else None

    def _send(self, beside: bool = False) -> None:
        """Start to copy what was posted, on the stream on which that was, or on the current one.

        beside: on the current one, which has waited for what was posted before the forward.
        """
        count, self._before = self._before if beside else len(self._unsent), 0
        unsent, self._unsent = self._unsent[:count], self._unsent[count:]
        if not unsent or self._device is None or self._staging is None:
            return
        words = slice(unsent[0].words.start, unsent[-1].words.stop)
        self._staged[words] = NOT_YET
        on = nullcontext() if beside or self._stream is None else torch.cuda.stream(self._stream)
        with on:
            self._staging[words].copy_(self._device[words], non_blocking=True)
            sent = self._sent()
        for pending in unsent:
            pending.arrived = sent
        self._pending += unsent

    def _sent(self) -> Any:
        """An event that says when all copies of now have arrived."""
        event: Any = self._idle.pop() if self._idle else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def before_forward(self) -> None:
        """The target's forward is launched next, on the current stream."""
        if self.gathers and self._unsent:
            self._ready, self._before = self._sent(), len(self._unsent)

    def meanwhile(self) -> None:
        """The target's forward runs now: enter what was gathered before it, without waiting for it.

        What was posted is read on another stream, after the event of :meth:`before_forward`.
        """
        ready, self._ready = self._ready, None
        if ready is None:
            return
        if self._before:
            with self._beside(ready):
                self._send(beside=True)
        self._idle.append(ready)
        self._enter_arrived(wait=True)

    def _beside(self, ready: Any) -> Any:
        """The context of another stream, on which everything before ``ready`` has happened."""
        if self._aside is None:
            self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._aside.wait_event(ready)
        return torch.cuda.stream(self._aside)

    def settle(self, wait: bool = False) -> None:
        """Enter what has arrived. With ``wait``, wait for everything that is on its way."""
        self._send()
        self._enter_arrived(wait)

    def _enter_arrived(self, wait: bool) -> None:
        while self._pending:
            first = self._pending[0]
            if wait:
                first.arrived.synchronize()
            elif not first.arrived.query():
                return
            self._pending.popleft()
            if not self._pending or self._pending[0].arrived is not first.arrived:
                self._idle.append(first.arrived)
            self._arrived(first)

    def _arrived(self, pending: _Pending) -> None:
        """Enter what was handed out, for the step in which that was."""
        self._step = pending.step
        try:
            pending.enter(self._staged[pending.words].copy())
        finally:
            self._step = None

    def salvage(self) -> None:
        """After an error of the device, enter what it had copied before it died."""
        self._unsent.clear()
        while self._pending and not bool((self._staged[self._pending[0].words] == NOT_YET).any()):
            self._arrived(self._pending.popleft())
        self._pending.clear()

    def stop_when_given_up(self, hook: Isolated) -> None:
        """Switch this hook off when the ledger is given up, or now, if it was."""
        hook.on = not self.broken
        self._hooks.append(hook)

    def mistaken(self, what: str) -> None:
        """Give up the ledger, because SGLang's own structures agree, and only the ledger differs.

        Then an event did not reach the ledger, and nothing is wrong with the server.
        """
        if not self.broken:
            self.give_up(
                "it missed an event: SGLang's own structures agree among themselves, and only the "
                f"ledger differs ({what}). The server is not accused. Please report this"
            )

    def give_up(self, why: str, error: BaseException | None = None) -> None:
        """The ledger can no longer be trusted. Tell every reader, the kernels included.

        error: the failure of ours that it comes from.
        """
        self.broken = why
        for hook in self._hooks:
            hook.on = False
        self.status.off(why, error)
        self._unsent.clear()
        self._pending.clear()
        if self.shadow is not None:
            self.shadow[-1:].fill_(0)
