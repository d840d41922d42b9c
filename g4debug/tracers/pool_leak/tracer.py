"""pool-leak: every KV page is free, held by the prefix cache, or owned by a live request.

The tracer counts all pages after the server became idle, and after every ``G4DEBUG_LEAK_STEPS``
busy steps. Two signs make it count at once (:mod:`g4debug.tracers.pool_leak.occasions`): a request
is given pages for tokens that it holds pages for, and no step is run although requests wait. It
counts in SGLang's own structures (:mod:`g4debug.tracers.pool_leak.look`). The page ledger
adds what SGLang's check does not know: the last owner of the page, and the event that should have
given it back. A count costs O(pages of the pools + nodes of the prefix cache). Between two counts
there is next to no cost.

A count must not keep requests waiting:

* On an idle server it goes on in slices (:mod:`g4debug.hooking.idle_work`). If SGLang's own leak
  check fails before, the count is brought to its end at once, so that the finding names the pages.
* On a busy server it cannot pause. There the next count waits until this one has cost at most one
  ``SHARE``-th of the time, unless ``G4DEBUG_LEAK_STEPS`` is below ``OFTEN``: a user who asks for
  that is looking for a leak.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import numpy as np

from g4debug.hooking import prefix_tree, req_kv
from g4debug.hooking.idle_work import IdleWork, State
from g4debug.ledger import cache_tree
from g4debug.ledger.holders import Holders, finish
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.pool_leak.check import Census, take_census
from g4debug.tracers.pool_leak.look import Rows, View, look
from g4debug.tracers.pool_leak.occasions import Stall, TakenAgain
from g4debug.tracers.pool_leak.report import (
    NAMED,
    Told,
    describe,
    describe_free_rows,
    describe_locked,
    describe_miscounted,
    describe_rows,
    worst,
)
from g4debug.tracers.pool_leak.servers import has_sessions, is_counted, unusable
from g4debug.tracers.silence import STEPS as SILENT

REMEMBERED = 4096  # requests whose release is remembered
SHARE = 200  # a count on a busy server may cost one SHARE-th of the time
PAGES_OF = "pages of the {} pool"  # what it counts; the flight recorder reads it
OFTEN = 256  # below so many steps, every count that was asked for is made


class PoolLeakTracer:
    def __init__(self, context: Context) -> None:
        assert context.ledger is not None, "declared as ledger=True"
        self.context, self.ledger = context, context.ledger
        # rid -> (step, whether the prefix cache keeps what it can) of its release, the latest last
        self.released: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        self.censuses = 0
        self._last_step = 0  # the step of the last census on a busy server
        self._not_before = 0.0  # time.monotonic() before which no busy census is made
        self.idle = IdleWork(self._look)  # the count on an idle server
        self.taken_again, self._stall = TakenAgain(), Stall()
        self._suspected = False  # a sign was seen, and no count was made since
        self._scheduler: Any = None  # of the pages to count
        # What is wrong and was reported already: (what it is, which one), by where it is.
        self._told: dict[str, set[tuple[str, int]]] = {}
        self._usable: bool | None = None

    def rests(self, mode: str) -> str:
        """Why no count is due on a busy server."""
        if self.context.settings.leak_steps not in range(1, SILENT + 1):
            return "it was asked to count less often"
        waits = self._not_before > time.monotonic() and self.context.settings.leak_steps >= OFTEN
        return "a count costs too much to be made more often" if waits else ""

    def install(self) -> None:
        self.context.status.rests = self.rests
        self.context.after("scheduler.init", self.after_scheduler_init)
        self.context.before("scheduler.on_idle", self.before_idle)
        self.context.on_exception("scheduler.on_idle", self.at_idle_error)
        self.context.after("scheduler.process_result", self.after_result)
        self.context.before("cache.release", self.before_release)
        self.context.after("batch.prepare_for_extend", self.after_prepare)
        if self.context.settings.leak_steps:
            self.ledger.listen(self.taken_again.listen, "extend")

    def before_release(self, request: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
        rid = str(request.rid)
        # From 0.5.23 on the argument is called "checkpoint", and can only be given by name.
        keeps = args[0] if args else kwargs.get("is_insert", kwargs.get("checkpoint", True))
        keeps = bool(keeps) and not getattr(request, "skip_radix_cache_insert", False)
        self.released[rid] = (self.context.recorder.step, keeps)
        self.released.move_to_end(rid)
        if len(self.released) > REMEMBERED:
            self.released.popitem(last=False)

    def after_prepare(self, result: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        for request in batch.reqs or ():  # one that was retracted begins anew
            self.released.pop(str(request.rid), None)
        return result

    def after_scheduler_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_usable(scheduler)  # it says so at start, and not at its first count
        return result

    def before_idle(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        # on_idle is called again and again while there is nothing to do.
        state = self._state_of(scheduler)
        if state == self.idle.done:
            return
        if scheduler.is_fully_idle():
            self.go_on(scheduler, state)
        elif self.context.settings.leak_steps and self._stall.seen(self.context.recorder.step):
            self.check(scheduler)

    def at_idle_error(self) -> None:
        """SGLang's own check of the idle server failed. Name the pages before that goes on."""
        if self.idle.work is not None and self.ledger.holders is not None:
            scheduler = self.ledger.holders.scheduler
            self.go_on(scheduler, self._state_of(scheduler), whole=True)

    def go_on(self, scheduler: Any, state: State, whole: bool = False) -> None:
        """Count the pages of an idle server: for one slice, or with ``whole`` to the end."""
        if not self._is_usable(scheduler):
            self.idle.done = state
            return
        self._scheduler = scheduler
        found = self.idle.go_on(state, whole)
        if found is not None:
            self.judge(*found, idle=True)

    def _look(self) -> Generator[None, None, tuple[list[View], Rows]]:
        self.ledger.settle(wait=True)
        return look(self._of(self._scheduler), self.live_requests())

    def after_result(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        every, step = self.context.settings.leak_steps, self.context.recorder.step
        if not every:
            return result
        self._suspected |= self.taken_again.seen()
        due = step - self._last_step >= every
        if due or self._suspected:
            begin = time.monotonic()
            if (due and every < OFTEN) or begin >= self._not_before:
                self._last_step, self._suspected = step, False
                self.check(scheduler)
                end = time.monotonic()
                self._not_before = end + SHARE * (end - begin)
        return result

    def check(self, scheduler: Any, idle: bool = False) -> None:
        """Count all pages at once, and report those that are wrong."""
        if self._is_usable(scheduler):
            self.ledger.settle(wait=True)
            self._scheduler = scheduler
            self.judge(*finish(look(self._of(scheduler), self.live_requests())), idle)

    def judge(self, views: list[View], rows: Rows, idle: bool) -> None:
        """Report the violations in the views of one look."""
        self.censuses += 1
        self.context.checked(1, "censuses")
        live = self.live_requests()
        for view in views:
            # The counts and their steps serve the coverage of a later dump.
            self.context.checked(view.pages - 1, PAGES_OF.format(view.name))
            census = take_census(
                view.pages, view.free, view.owned, view.maybe, view.used, view.shared
            )
            self._report(view.name, census, live, idle)
        self._judge_rows(rows, live, idle)
        for view in views:
            self._judge_sizes(view, live, idle)

    def _judge_rows(self, rows: Rows, live: list[Any], idle: bool) -> None:
        # On an idle server no request may hold a row: its pages look owned, but are lost.
        if idle and self._is_new("held rows", [("row", req_kv.row(r)) for r in live]):
            got = f"rows {_list(req_kv.row(r) for r in live)} of requests that have ended"
            self._tell("row", got, idle, lambda: describe_rows(live, self.released, self.ledger))
        holders = self._of(self._scheduler)
        for kind, where, bad in (
            ("row-repeated", "free rows", rows.again),
            ("row-repeated", "no rows", rows.outside),
            ("row", "lost rows", rows.unknown),
        ):
            if kind == "row" and (live or not idle):
                continue
            new = self._is_new(where, [(kind, row) for row in bad])
            if new:
                described = partial(
                    describe_free_rows, kind, [row for _, row in new], where, holders, self.ledger
                )
                self._tell(kind, f"rows {_list(row for _, row in new)}", idle, described)

    def _judge_sizes(self, view: View, live: list[Any], idle: bool) -> None:
        """Judge the prefix cache's own figures of its size, by which SGLang admits requests."""
        sizes = view.sizes
        if sizes is None:
            return
        off = sum(sizes) - view.cached
        if self._is_new(f"size of {view.name}", [("off", off)] if off else []):
            got = f"{sizes} for {view.cached} tokens of the {view.name} pool"
            self._tell(
                "miscounted", got, idle, lambda: describe_miscounted(view, self.ledger, idle)
            )
        # A session locks what it reads, and it has no request between its turns.
        sessions = has_sessions(self._scheduler.tree_cache)
        if idle and not live and not sessions:
            pages, held = np.empty(0, dtype=np.int64), list[tuple[str, int]]()
            if sizes.protected:
                tree = prefix_tree.innermost(self._scheduler.tree_cache)
                size = self._of(self._scheduler).page_size
                pages = np.unique(cache_tree.locked(tree, view.name) // size)
                held = [("locked", int(page)) for page in pages] or [("locked", -1)]
            if self._is_new(f"locks of {view.name}", held):
                self._tell(
                    "locked",
                    f"{sizes.protected} tokens of the {view.name} pool, full pages {_list(pages)}",
                    idle,
                    lambda: describe_locked(view, pages, self.released, self.ledger),
                )

    def _state_of(self, scheduler: Any) -> State:
        """The state that must not change while a look goes on."""
        return (self.context.recorder.step, self.ledger.serial, *self._of(scheduler).signature())

    def _of(self, scheduler: Any) -> Holders:
        holders = self.ledger.holders
        if holders is None or holders.scheduler is not scheduler:
            holders = Holders(scheduler.token_to_kv_pool_allocator)
            holders.scheduler = scheduler
        return holders

    def live_requests(self) -> list[Any]:
        """The requests that hold a row of req_to_token. Of a session, that is the one that runs."""
        known = list(self.ledger.requests.values())
        return [r for r in known if req_kv.row(r) >= 0]

    def _report(self, pool: str, census: Census, live: list[Any], idle: bool) -> None:
        """Report what is new of a census: what was wrong before would hide what is wrong now."""
        wrong = census.wrong()
        new = set(self._is_new(pool, [(k, int(p)) for k, pages in wrong.items() for p in pages]))
        if not new:
            return
        news = Census(
            **{k: pages[[(k, int(p)) in new for p in pages]] for k, pages in wrong.items()}
        )
        kind = worst(news)
        self._tell(
            kind,
            f"{pool} pages {_list(news.wrong()[kind])}",
            idle,
            lambda: describe(pool, news, live, self.released, self.ledger, idle),
        )

    def _tell(self, kind: str, got: str, idle: bool, make: Callable[[], Told]) -> None:
        site = "scheduler.on_idle" if idle else "scheduler.process_result"
        self.context.trap.report(*self.context.described(kind, site, got, make))

    def _is_new(self, where: str, found: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """What is wrong there now and was not reported. What is right again may be told again."""
        told, self._told[where] = self._told.get(where, set()), set(found)
        return [one for one in found if one not in told]

    def _is_usable(self, scheduler: Any) -> bool:
        """True if everything that can hold pages in this server is known here."""
        if self._usable is None:
            self._usable = is_counted(self.context, scheduler, unusable(scheduler))
        return self._usable


def _list(numbers: Iterable[int]) -> str:
    named = [str(int(n)) for n in numbers]
    return ", ".join(named[:NAMED]) + (", …" if len(named) > NAMED else "")


TRACER = Tracer(
    id="pool-leak",
    title="every KV page is free, cached, or owned by a live request",
    install=lambda context: PoolLeakTracer(context).install(),
    ledger=True,
    without_ledger="whose pages they are is not known",
)
