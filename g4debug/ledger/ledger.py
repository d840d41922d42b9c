"""The page ledger: the holders and the events of all KV pages, kept on the host.

:mod:`g4debug.ledger.hooks` feeds it from SGLang's allocators. The tracers that listen judge each
event. Then it is entered into the books of its pool (:mod:`g4debug.ledger.books`) and into the log
(:mod:`g4debug.ledger.page_history`). An event costs O(pages of the event). On a GPU the indices are
on the device, and :mod:`g4debug.ledger.index_transport` brings them. For kernels there is a copy on
the device, the shadow (:mod:`g4debug.ledger.shadow`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from g4debug.findings.record import PageEvent
from g4debug.findings.status import LEDGER
from g4debug.hooking.hooks import Isolated
from g4debug.ledger import snapshot
from g4debug.ledger.books import Flags, Pages, Pairs, PoolLedger, distinct
from g4debug.ledger.doubts import Doubts
from g4debug.ledger.free_lists import FreeLists
from g4debug.ledger.index_transport import IndexTransport
from g4debug.ledger.owners import Owners
from g4debug.ledger.page_history import SHOWN, EventLog
from g4debug.ledger.shadow import FREE, Marks

if TYPE_CHECKING:
    from g4debug.findings.steps import Recorder
    from g4debug.ledger.holders import Holders

logger = logging.getLogger("g4debug")
DOUBTS = 16  # more than so many that are not forgotten yet: the ledger is given up
# Called with (pool, event, all pages of the event) before the event changes the ledger. If pages
# are about to be freed, a listener may return the pages to free instead.
Listener = Callable[[PoolLedger, PageEvent, Pages], "Pages | None"]
# Called with (pool, events, pages) where each page is handed out to another request, and each is a
# free page of the pool, given once: in place of one call for each event.
Fresh = Callable[[PoolLedger, Sequence[PageEvent], Pages], None]
# Called when SGLang asks to free full pages, with whether that waits for the end of a free group.
# It may return a function that judges them (:data:`Judge`), if it has something to say about this.
Asked = Callable[[bool], "Judge | None"]
# Called with the pool, the event and its pages before they are freed, or, where their indices have
# to come from a device, soon after. Returns those that must not be freed.
Judge = Callable[[PoolLedger, PageEvent, Pages], Pages]


class Ledger:
    """The pages of the allocators in this process.

    batch: the ScheduleBatch that is being prepared or run, or was run last.
    allocating: the batch for which pages are allocated now. None outside of the calls in which
        SGLang prepares or runs a batch: then it is not known which request gets the pages.
    holders: who holds the pages according to SGLang's own structures.
    requests: rid -> SGLang's Req.
    pairs: while an event about the mapping is entered, the pairs of pages that it concerns.
    belongs: (full pages, SWA pages) -> for each, whether SGLang's mapping leads from the one to the
        other, or led there until SGLang decided to free it. Set by the hooks of this release.
    judges_first: tracers for which a free is entered before it happens, even if that has to wait.
    shadow, owners: the full pool's, see :mod:`g4debug.ledger.shadow`, :mod:`g4debug.ledger.owners`.
    lists: for each pool, the free lists of its allocator, which show whether events were missed.
    broken: why the ledger was given up, '' while it is sound. Nothing may be concluded from a
        ledger that was given up.
    """

    belongs: Callable[[Pages, Pages], Flags]

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.pools: dict[str, PoolLedger] = {}
        self.log = EventLog(self.pools)
        self.history, self.last_events = self.log.history, self.log.last
        self.transport = IndexTransport(recorder)
        self.listeners: list[tuple[Listener, tuple[str, ...]]] = []  # with their kinds of events
        self._fresh: dict[Listener, Fresh] = {}
        self.asked: list[Asked] = []
        self.batch: Any = None
        self.allocating: Any = None
        self.holders: Holders | None = None
        self.requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.pairs: Pairs | None = None
        self.judges_first: set[str] = set()
        self.shadow: torch.Tensor | None = None
        self.owners: Owners | None = None
        self.lists: dict[str, FreeLists] = {}
        self.broken = ""
        self.status = recorder.status.part(LEDGER)
        self._entered = self.status.tally("events")
        self._doubts, self._failures = Doubts(recorder), Doubts(recorder)
        self._hooks: list[Isolated] = []  # which must not run any more once it is broken

    # --- what happened -------------------------------------------------------------------

    @property
    def serial(self) -> int:
        """The number of the next event."""
        return self.log.serial

    def owner(self, pool: str, page: int) -> str:
        """rid of the last request that a page was handed out for, '' if not known."""
        books = self.pools.get(pool)
        return str(books.owner[page]) if books is not None and 0 <= page < books.pages else ""

    # --- what happens --------------------------------------------------------------------

    def listen(self, listener: Listener, *kinds: str, fresh: Fresh | None = None) -> None:
        """Call a listener for each event, or only for events of these kinds.

        fresh: what is called instead, once, in :meth:`enter_each`.
        """
        self.listeners.append((listener, kinds))
        if fresh is not None:
            self._fresh[listener] = fresh

    def enter(
        self,
        pool: PoolLedger,
        kind: str,
        pages: Pages,
        *,
        holds: bool | None,
        positions: Pages | list[int] | None = None,
        **words: Any,
    ) -> Pages:
        """Enter one event. ``holds``: whether the pages are held after it, None for no change.

        positions: as of ``PoolLedger.enter``. words: as of :meth:`event`.

        The listeners are called first, while the ledger still has the state before the event.
        Returns the pages of the event, which a listener may have corrected if they are freed.
        If a listener raises an exception, that goes on to the caller. A free is then not entered,
        because it will not happen. A hand-out is entered, because it has happened.
        """
        event = self.event(pool, kind, pages, **words)
        happened = holds is not False
        try:
            for listener, kinds in self.listeners:
                if not kinds or kind in kinds:
                    instead = listener(pool, event, pages)
                    if instead is not None:
                        pages = instead
            happened = True
        finally:
            if happened:
                log = self.log
                log.events.append(event)
                if log.also is not None:
                    log.also(event)
                pool.enter(pages, log.serial, holds, event.request, positions)
                log.serial += 1
                self._entered.count += 1
                self._entered.step = event.step
        return pages

    def enter_each(
        self,
        pool: PoolLedger,
        kind: str,
        pages: Pages,
        requests: Sequence[str],
        positions: Pages,
        caller: str,
    ) -> bool:
        """Enter that each of these pages was handed out to the request at the same place.

        The same as an :meth:`enter` of each page, in a fraction of the time: with pages of one
        token a decode hands a page to each request, in each step. False, and nothing is entered, if
        something is wrong with one of them: then it takes an event of its own to say with which.

        positions: int64 [pages], the position of each page's token in its request.
        """
        if not pool.are_new(pages):
            return False
        step, name = self._step(), pool.name
        events = [
            PageEvent(step, kind, name, (page,), 1, request, caller)
            for page, request in zip(pages.tolist(), requests, strict=True)
        ]
        try:
            for listener, kinds in self.listeners:
                if kinds and kind not in kinds:
                    continue
                fresh = self._fresh.get(listener)
                if fresh is not None:
                    fresh(pool, events, pages)
                    continue
                for at, event in enumerate(events):
                    listener(pool, event, pages[at : at + 1])
        finally:
            log = self.log
            log.events.extend(events)
            if log.also is not None:
                for event in events:
                    log.also(event)
            pool.enter_each(pages, log.serial, requests, positions)
            log.serial += len(events)
            self._entered.count += len(events)
            self._entered.step = step
        return True

    def event(self, pool: PoolLedger, kind: str, pages: Pages, **words: Any) -> PageEvent:
        """An event in this step, or in the step that posted the indices that are entered now.

        words: str each: the request, the caller of the allocator, and a note.
        """
        count = len(pages)
        named = pages if count <= SHOWN else pages[:SHOWN]
        return PageEvent(self._step(), kind, pool.name, tuple(named.tolist()), count, **words)

    def _step(self) -> int:
        """The step of an event that is entered now."""
        step = self.transport.step
        return self.recorder.step + self.recorder.preparing if step is None else step

    # --- indices on their way to the host --------------------------------------------------

    @staticmethod
    def is_far(indices: torch.Tensor) -> bool:
        """True if reading these indices needs a copy from a device."""
        return bool(indices.is_cuda)

    @property
    def late(self) -> bool:
        """True while something is entered that happened some time ago."""
        return self.transport.step is not None

    def post(
        self,
        indices: torch.Tensor,
        enter: Callable[[Pages], None],
        mapping: torch.Tensor | None = None,
        marks: Marks | None = None,
    ) -> None:
        """Call ``enter`` with the values of an index tensor: at once on a CPU, later on a GPU.

        ``enter`` gets the values of now, even if the tensor changes before it is called. indices:
        int32 or int64 [n]. mapping: SGLang's; then ``enter`` gets [2 n] values: the indices, and
        then the mapping's entries for them. marks: set in the shadow at once, for these indices.
        """
        if self.is_far(indices):
            self.transport.post(indices, enter, mapping, marks)
        else:
            enter(snapshot.read(indices, mapping, marks))

    def settle(self, wait: bool = False) -> None:
        """Enter what has arrived. With ``wait``, wait for everything that is on its way."""
        if self.transport.waiting:
            self.transport.settle(wait)

    # --- a ledger that must not be believed -------------------------------------------------

    def stop_when_given_up(self, hook: Isolated) -> None:
        """Switch this hook off when the ledger is given up, or now, if it was."""
        hook.on = not self.broken
        self._hooks.append(hook)

    def missed(self, pool: str) -> bool:
        """True if something that the allocator of a pool did may have been missed."""
        lists = self.lists.get(pool)
        return lists is None or lists.missed or self.late

    def mapping_overwritten(self, full: Pages) -> bool:
        """True if SGLang's mapping gives one of these full pages another SWA page than it has.

        No function of SGLang's does so while both pages are held, so if no call of an allocator was
        missed, the mapping was changed past all of them. Two pages that are exchanged in it leave
        it in order, and only this tells. Not while something is entered late: then the books are
        older than the mapping. May wait for the device.
        """
        pool, swa, holders = self.pools.get("full"), self.pools.get("swa"), self.holders
        if pool is None or swa is None or holders is None or self.broken or self.late:
            return False
        self.settle(wait=True)
        if self.missed("full") or self.missed("swa"):
            return False
        full = pool.inside(full)
        given, theirs = pool.partner[full], holders.mapped(full)
        ours = pool.held[full] & (given > 0) & (given < swa.pages)
        given = np.where(ours, given, 0)
        ours &= swa.held[given] & (swa.partner[given] == full)
        return bool((ours & (theirs > 0) & (theirs != given)).any())

    def doubt(self, pool: str, pages: Pages, what: str) -> None:
        """SGLang's own structures agree among themselves, and only the ledger differs.

        Mostly an event did not reach the ledger, and nothing is wrong with the server. Then the
        ledger takes SGLang's word for these pages from now on. It is given up after more than
        DOUBTS such doubts if events were missed, and after 16 times as many if none were; one of
        them is forgotten in every FORGETS steps.
        """
        if self.broken or not self._believe(pool, pages):
            return  # a copy of the books may be older than they are
        doubts = self._doubts.add()
        missed = self.missed("full") or self.missed("swa")
        agree = "SGLang's own structures agree among themselves, and only the ledger differs"
        if doubts > (DOUBTS if missed else 16 * DOUBTS):
            self.give_up(
                f"it missed events: {doubts} times {agree} (now: {what}). The server is not "
                "accused. Please report this"
            )
            return
        why = "An event was missed"
        if not missed:
            why = "No missed event is known, so they may have been changed without one: suspected"
        logger.warning(
            "g4debug: page ledger: %s pages %s are in doubt (%s): %s. %s. The server is not "
            "accused. What SGLang says of these pages is believed from now on; everything else is "
            "judged as before",
            pool,
            ", ".join(map(str, pages[:SHOWN].tolist())),
            what,
            agree,
            why,
        )
        self.status.limit(
            "a page in doubt counts as what SGLang's own structures say of it",
            f"{pool} pages {', '.join(map(str, pages[:SHOWN].tolist()))}: {why.lower()}",
            quiet=True,
        )

    def unasked(self, pool: str, pages: Pages, what: str, error: Exception) -> None:
        """SGLang's own structures could not be asked about these pages: a failure of ours.

        Nothing is told of them, and everything else is judged as before, because what the ledger
        knows of other pages is none the worse for it. Each time may wait for the device, so the
        ledger is given up after more than DOUBTS of them, of which one is forgotten in every
        FORGETS steps.
        """
        if self.broken:
            return
        why = f"{type(error).__name__}: {error}"
        count = self._failures.add()
        if count > DOUBTS:
            self.give_up(
                f"{count} times SGLang's own structures could not be asked (now about {what}): "
                f"{why}",
                error,
            )
            return
        self.status.limit(
            "nothing is told of a page about which SGLang's own structures cannot be asked",
            f"{what}: {why}",
            error,
        )
        with suppress(Exception):  # what has failed may fail again
            self._believe(pool, pages)

    def _believe(self, name: str, pages: Pages) -> bool:
        """Take over the state of these pages from SGLang. False if it is no news. Waits."""
        pool, holders = self.pools.get(name), self.holders
        if pool is None or holders is None:
            return True
        pages = pool.inside(distinct(pages))
        held = ~holders.is_given_back(name, pages)
        before = pool.held[pages].copy(), pool.partner[pages].copy()
        pool.held[pages] = held
        pool.ever[pages] = True
        words = np.zeros(len(pages), dtype=np.int64)
        swa = self.pools.get("swa")
        if name != "full":
            pool.partner[pages] = words - 1
        elif swa is not None:
            words = np.maximum(holders.mapped(pages), 0)
            words[words >= swa.pages] = 0
            pool.partner[pages] = words
            swa.partner[words[words > 0]] = pages[words > 0]
        if name == "full":
            self._mark(pages, np.where(held, words, FREE))
        same = np.array_equal(before[0], held) and np.array_equal(before[1], pool.partner[pages])
        return not (same and len(pages))

    def _mark(self, pages: Pages, words: Pages) -> None:
        """Set the words of these full pages in the shadow, and forget their owners."""
        if self.owners is not None:
            at = torch.from_numpy(pages).to(self.owners.pages.device)
            self.owners.pages[at] = 0
        if self.shadow is not None:
            at = torch.from_numpy(pages).to(self.shadow.device)
            self.shadow[at] = torch.from_numpy(words).to(self.shadow)

    def give_up(self, why: str, error: BaseException | None = None) -> None:
        """The ledger can no longer be trusted. Tell every reader, the kernels included.

        error: the failure of ours that it comes from.
        """
        self.broken = why
        for hook in self._hooks:
            hook.on = False
        self.status.off(why, error)
        self.transport.forget()
        if self.shadow is not None:
            self.shadow[-1:].fill_(0)
