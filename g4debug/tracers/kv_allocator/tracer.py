"""kv-allocator: a KV page has one holder, and a full page has one SWA page.

The tracer listens to the page ledger, into which every event of SGLang's allocators is entered. It
checks that

* pages that are handed out are in range, not page 0, and held by nobody;
* pages that a sequence continues in are held;
* pages that are freed are held, and freed only once;
* the release of a request frees no page that another request owns which still runs;
* no full page of the prefix cache is freed that a running request reads;
* the full-to-SWA mapping says what the allocators handed out, and never points to a freed page;
* SWA pages that are evicted lie outside the window of the request that they belong to.

SGLang's own structures must confirm the ledger before a violation becomes a finding
(:mod:`g4debug.tracers.kv_allocator.confirm`). If they do not, the ledger is given up.

A check costs O(pages of the event). On a GPU, the indices of pages that are handed out reach the
host a little later. So do the indices of freed pages where SGLang itself does not wait for them
(from 0.5.18 on). Every other free is judged before it happens; in contain mode, every free. The
owners of pages that a release frees are judged when SGLang asks for the free, even if it frees them
later.

In contain mode an allocator does not get back a page that it already has, or that is not its own.
Where the mapping is wrong, the SWA pages are freed that were handed out with the full pages.
Everything else cannot be undone safely, and is only reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from g4debug.findings.kinds import KINDS, Contain
from g4debug.findings.record import Evidence, Finding, PageEvent
from g4debug.hooking import req_kv
from g4debug.hooking.arguments import argument
from g4debug.ledger.books import PoolLedger, on_host
from g4debug.ledger.ledger import Judge
from g4debug.ledger.owners import cached_tokens
from g4debug.sanitizer import unsupported
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.kv_allocator.check import (
    Pages,
    Violation,
    check_freed,
    check_handed_out,
    check_partners,
    in_window,
)
from g4debug.tracers.kv_allocator.confirm import in_question, is_real
from g4debug.tracers.kv_allocator.readers import Readers, columns_of

# Kind of an event of the page ledger -> the tally that counts it.
COUNTED = {
    **dict.fromkeys(("extend", "decode", "alloc"), "hand-outs"),
    **dict.fromkeys(("free", "evict"), "frees"),
    **dict.fromkeys(("map", "unmap"), "mappings"),
}
KNOWN = 4096  # about so many requests that have run are remembered


@dataclass
class Release:
    """The request for which ``release_kv_cache`` was called.

    row: the request's row of req_to_token, None if it has none. told: the full pages of other
    requests that were reported already. SGLang asks to free a page before it is really freed.
    """

    rid: str
    row: int | None
    told: set[int] = field(default_factory=set)


class KvAllocatorTracer:
    def __init__(self, context: Context) -> None:
        assert context.ledger is not None, "declared as ledger=True"
        self.context, self.ledger = context, context.ledger
        self.contain = context.settings.mode == "contain"
        if self.contain:  # it corrects a free before it happens
            self.ledger.judges_first.add(context.tracer_id)
        # rid -> (row, retractions) when the request ran. Only then is what its row says its own.
        self._ran: dict[str, tuple[int, int]] = {}
        self._releasing: Release | None = None
        self._readers = Readers(self.ledger, context.isolate)
        # rid -> (step, length that _evict_swa was given). What it frees may be judged later.
        self._evicting: dict[str, tuple[int, int]] = {}
        self._unjudged = ""  # why this server's pages are not judged, '' if they are
        # By kind of event. They are added to without a call, because there are many events.
        self._tallies = {kind: context.status.tally(what) for kind, what in COUNTED.items()}
        self._others = context.status.tally("other events")

    def install(self) -> None:
        self.ledger.listen(self.listen, fresh=self.listen_to_fresh)
        self.ledger.asked.append(self.asked)
        self.context.before("scheduler.init", self.before_scheduler_init)
        self.context.before("scheduler.run_batch", self.before_run_batch)
        self.context.before("batch.evict_swa", self.before_evict_swa)
        self.context.before("cache.release", self.before_release)
        self.context.after("cache.release", self.after_release)
        self.context.after("scheduler.process_result", self.after_process_result)
        # Judge what was handed out in this step before the step's tokens leave the server.
        self.context.before("scheduler.stream_output", self.before_stream_output)
        self.context.on_exception("scheduler.run_event_loop", self.ledger.transport.salvage)

    def before_scheduler_init(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        self._unjudged = unsupported.other_books(argument(args, kwargs, 0, "server_args"))
        if self._unjudged:
            self.context.off(self._unjudged)

    def before_run_batch(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if self._unjudged:
            return
        self._releasing = None  # should a release have failed
        if batch.forward_mode is None or not batch.forward_mode.is_extend():
            return
        if len(self._ran) > KNOWN:
            self._ran = {r: ran for r, ran in self._ran.items() if r in self.ledger.requests}
        for request in batch.reqs:
            if (row := req_kv.row(request)) >= 0:
                self._ran[str(request.rid)] = (row, _retractions(request))
        self._readers.learn(batch.reqs, batch.req_to_token_pool.req_to_token)

    def after_process_result(
        self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # The prefix cache has now taken over what was prefilled, or has lent its own instead.
        if batch.forward_mode is not None and batch.forward_mode.is_extend():
            self._readers.learn(batch.reqs, batch.req_to_token_pool.req_to_token)
        return result

    def before_evict_swa(self, batch: Any, request: Any, pre_len: int, **kwargs: Any) -> None:
        step = self.context.recorder.event_step
        self._evicting = {r: at for r, at in self._evicting.items() if at[0] >= step - 1}
        self._evicting[str(request.rid)] = (step, int(pre_len))

    def before_release(self, request: Any, *args: Any, **kwargs: Any) -> None:
        # Its row is given back in the release, so it is noted now.
        row = req_kv.row(request)
        self._releasing = Release(str(request.rid), row if row >= 0 else None)
        self._readers.forget(str(request.rid))

    def after_release(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self._releasing = None
        return result

    def before_stream_output(self, *args: Any, **kwargs: Any) -> None:
        if not self.ledger.broken:
            self.ledger.settle()

    def asked(self, deferred: bool) -> Judge | None:
        """SGLang asks to free full pages: the judge of whether they may be freed.

        At the end of a free group nobody knows any more which release asked for it.
        """
        release = self._releasing
        if self._unjudged or (release is None and not deferred):
            return None

        def judge(pool: PoolLedger, event: PageEvent, pages: Pages) -> Pages:
            self._read(pool, event, pages)
            return pages[:0] if release is None else self._foreign(pool, event, pages, release)

        return judge

    # --- one event -----------------------------------------------------------------------

    def listen(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> Pages | None:
        """Judge an event. If some pages must not be freed, returns those to free instead."""
        if self._unjudged:
            return None
        tally = self._tallies.get(event.kind, self._others)
        tally.count, tally.step = tally.count + 1, self.context.recorder.step
        if event.kind in ("extend", "decode", "alloc"):
            violation = check_handed_out(pages, pool.held) if len(pages) else None
            if violation is not None:
                self._report(pool, event, violation)
        elif event.kind in ("free", "evict"):
            return self._freed(pool, event, pages)
        elif event.kind == "unmap":
            return self._unmapped(pool, event, pages)
        elif event.kind == "use":
            self._report(pool, event, Violation("use-after-free", pages))
        elif event.kind in ("mismatch", "miswritten"):
            self._report(pool, event, Violation("mapping-mismatch", pages))
        elif event.kind == "returned":
            violation = check_handed_out(pages, pool.held) or Violation("use-after-free", pages)
            self._report(pool, event, violation)
        elif event.kind == "map" and pool.name == "swa":
            used = pages[pages != 0]  # 0 means no SWA page
            loose = pool.not_held(used)
            if len(loose):
                self._report(pool, event, Violation("maps-freed", loose))
        return None

    def listen_to_fresh(self, pool: PoolLedger, events: Sequence[PageEvent], pages: Pages) -> None:
        """Pages that were handed out one by one, and are new: count them, for nothing is wrong."""
        if not self._unjudged:
            tally = self._tallies.get(events[0].kind, self._others)
            tally.count, tally.step = tally.count + len(events), self.context.recorder.step

    def _unmapped(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> Pages | None:
        """Judge the mapping of the full pages that lose their SWA pages ``pages``."""
        pairs = self.ledger.pairs
        if pairs is None or pool.name != "swa":
            return None
        expected = pairs.swa
        foreign, lost = check_partners(pages, expected)
        if not (len(foreign) or len(lost)):
            return None
        note = f"the full pages have the SWA pages {_list(expected)}, but the mapping says "
        note += _list(pages)
        bad = foreign if len(foreign) else lost
        self._report(pool, event, Violation("mapping-mismatch", bad), note)
        if self.ledger.broken or not self.contain:
            return pages
        return expected[pool.held[expected]]

    def _freed(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> Pages | None:
        instead = self._unmapped(pool, event, pages)
        if instead is not None:
            return None if instead is pages else instead
        violations = check_freed(pages, pool.held, pool.ever)
        for violation in violations:
            self._report(pool, event, violation)
        if self.ledger.broken:
            return None
        inside = pool.inside(pages)
        if pool.name == "swa" and self.ledger.pairs is None:
            self._freed_unmapped(pool, event, inside)
        if event.kind == "evict":
            self._evicted(pool, event, inside)
        foreign = inside[:0]
        if pool.name == "full" and event.kind == "free":
            self._read(pool, event, inside)
            if self._releasing is not None:
                foreign = self._foreign(pool, event, inside, self._releasing)
        if not (violations or len(foreign)) or not self.contain:
            return None
        return np.setdiff1d(inside[pool.held[inside]], foreign)

    def _foreign(self, pool: PoolLedger, event: PageEvent, pages: Pages, release: Release) -> Pages:
        """Judge a request's release. Returns the pages that must not be freed, in contain mode."""
        none, batch = pages[:0], self.ledger.batch
        if batch is None or self.ledger.broken:
            return none
        found = [none]
        for owner, request in self._running(set(pool.owner[pages].tolist()) - {release.rid}):
            mine = pages[(pool.owner[pages] == owner) & pool.held[pages]]
            mine = mine[pool.position[mine] >= cached_tokens(request)]
            mine = mine[pool.position[mine] < req_kv.allocated(request)]
            if len(mine):
                mine = mine[_full_pages(pool, mine, request, batch) == mine]
            found.append(mine)
            new = mine[~np.isin(mine, list(release.told))]
            if len(new):
                release.told.update(new.tolist())
                where = self._row_of(pool, int(new[0]), release.row, batch)
                self._report(pool, event, Violation("foreign-free", new), "", release.rid, where)
        return np.concatenate(found) if self.contain else none

    def _read(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> None:
        """Judge a free of full pages: does a request that runs read them from the prefix cache?"""
        batch = self.ledger.batch
        if batch is None or self.ledger.broken or not self._readers.reading:
            return
        rows = batch.req_to_token_pool.req_to_token
        for reading, theirs in self._readers.of(pages):
            if not any(self._running([reading.rid])):
                continue
            columns = columns_of(reading, theirs, rows, pool.page_size)
            new = [c for c in columns.tolist() if int(reading.pages[c]) not in reading.told]
            if new and pool.held[reading.pages[new]].any():
                found = reading.pages[new]
                reading.told.update(found.tolist())
                first = new[0] * pool.page_size
                note = f"the first one has tokens {first}..{first + pool.page_size - 1} of request "
                note += f"{reading.rid}, in column {new[0]} of row {reading.row} of req_to_token"
                self._report(pool, event, Violation("freed-while-read", found), note, reading.rid)

    def _row_of(self, pool: PoolLedger, page: int, row: int | None, batch: Any) -> str:
        """Where a row of req_to_token names a full page, in words. '' if it does not. Waits."""
        if row is None:
            return ""
        first = batch.req_to_token_pool.req_to_token[int(row), :: pool.page_size]
        columns = (first // pool.page_size == page).nonzero().flatten().tolist()
        return f"column {columns[0]} of its row {row} of req_to_token" if columns else ""

    def _freed_unmapped(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> None:
        """Judge SWA pages that are freed by themselves: no full page may map to them."""
        full = self.ledger.pools["full"]
        partners = pool.partner[pages]
        mapped = (partners > 0) & full.held[partners] & (full.partner[partners] == pages)
        if mapped.any():
            self._report(pool, event, Violation("maps-freed", pages[mapped]))

    def _evicted(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> None:
        """Judge SWA pages that are freed while their full pages stay: no request may need them."""
        batch = self.ledger.batch
        cache = getattr(batch, "tree_cache", None)
        window = getattr(cache, "sliding_window_size", None)
        if not isinstance(window, int) or window <= 0:
            return
        for rid, request in self._running(set(pool.owner[pages].tolist())):
            query = req_kv.committed(request)
            step, length = self._evicting.get(rid, (-1, -1))
            if step == event.step:
                query = min(query, length)
            mine = pages[pool.owner[pages] == rid]
            mine = mine[in_window(pool.position[mine], pool.page_size, query, window)]
            # Others may be pages that the request had before it was retracted, and that the prefix
            # cache holds now. This waits for the device, but is rarely asked.
            mine = mine[self.ledger.belongs(_full_pages(pool, mine, request, batch), mine)]
            if len(mine):
                first = int(pool.position[mine[0]])
                last = first + pool.page_size - 1
                note = f"tokens {first}..{last} of request {rid}; its next query is token {query}, "
                note += f"which attends to {max(0, query - window)}..{query}"
                self._report(pool, event, Violation("evicted-in-window", mine), note, rid)

    def _running(self, rids: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """The requests that have run in the row that they have now, and are not finished."""
        for rid in rids:
            request = self.ledger.requests.get(rid)
            if request is None or (row := req_kv.row(request)) < 0 or request.finished():
                continue
            if self._ran.get(rid) == (row, _retractions(request)):
                yield rid, request

    def _stops(self, pool: PoolLedger, event: PageEvent, violation: Violation) -> bool:
        """True if the allocator does not get back the page that the finding is about."""
        mode = self.context.settings.mode
        if event.kind not in ("free", "evict", "unmap") or self.ledger.late or mode == "log":
            return False
        # If a held page is given twice in one call, contain mode frees it once.
        once = violation.kind == "double-free" and bool(pool.held[violation.pages[0]])
        corrected = KINDS["kv-allocator"][violation.kind].contain is not Contain.REPORTS
        return mode == "raise" or (corrected and not once)

    def _report(
        self,
        pool: PoolLedger,
        event: PageEvent,
        violation: Violation,
        note: str = "",
        request: str = "",
        row: str = "",
    ) -> None:
        if self.ledger.broken:
            return
        pages = f"{pool.name} pages {_list(violation.pages)}"
        in_doubt = *in_question(self.ledger, pool, violation), f"{violation.kind} of {pages}"
        try:
            real = is_real(self.ledger, pool, event, violation)
        except Exception as e:
            self.ledger.unasked(*in_doubt, e)
            return
        if not real:
            self.ledger.doubt(*in_doubt)
            return

        def make() -> tuple[Finding, Evidence]:
            from g4debug.tracers.kv_allocator.report import describe

            finding, events = describe(self.ledger, pool, event, violation, note, request, row)
            if self._stops(pool, event, violation):
                events = (*events[:-1], dataclasses.replace(events[-1], stopped=True))
            return finding, Evidence(events=events)

        site = f"pool.{event.kind}"
        self.context.trap.report(*self.context.described(violation.kind, site, pages, make))


def _full_pages(pool: PoolLedger, pages: Pages, request: Any, batch: Any) -> Pages:
    """The full page that the request's row names at the position of each of ``pages``. Waits."""
    row = batch.req_to_token_pool.req_to_token[req_kv.row(request)]
    tokens = row[torch.from_numpy(pool.position[pages]).to(row.device)]
    return on_host(tokens) // pool.page_size


def _retractions(request: Any) -> int:
    return int(getattr(request, "retraction_count", 0))


def _list(pages: Pages) -> str:
    return (
        ", ".join(str(p) for p in pages[:8].tolist()) + (", …" if len(pages) > 8 else "") or "none"
    )


TRACER = Tracer(
    id="kv-allocator",
    title="a KV page has one holder, and a full page has one SWA page",
    install=lambda context: KvAllocatorTracer(context).install(),
    ledger=True,
)
