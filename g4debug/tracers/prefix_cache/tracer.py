"""prefix-cache: checks the pages that the prefix cache gets, and those that it hands out.

A request hands the pages of its first tokens over (*insert*) when a part of its prompt is computed
and when it ends. They must be whole pages, its own ones or those that the prefix cache lent to it,
in the order of its tokens, each once, and no more than it has KV for. The prefix cache hands pages
out when another request begins with the same tokens, and to the request itself right after an
insert. They must hold the KV of exactly these tokens, and nobody may have freed them.

The tracer notes of each page that is handed over from which tokens its KV was computed
(:mod:`g4debug.tracers.prefix_cache.contents`), in host memory. It compares that at the next insert
and hand-out. Nodes are not watched: a node that is split, merged, or that loses its SWA pages is no
event. On a GPU the slots reach the host a little later (:mod:`g4debug.ledger.index_transport`), in
the order of all that happens to pages, and are judged then: within the step.

As long as a request runs, its row of ``req_to_token`` must have the slots of its nodes: that is
compared in each step (:mod:`g4debug.tracers.prefix_cache.lent_rows`).

A suspicion that rests on the page ledger must be confirmed by SGLang's own structures before it
becomes a finding (:mod:`g4debug.tracers.prefix_cache.confirm`). If they do not confirm it, nothing
is reported, the log says so, and the page's entry is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Evidence, Finding, PageEvent
from g4debug.hooking import prefix_tree, req_kv
from g4debug.hooking.arguments import argument
from g4debug.hooking.resolved import server_argument
from g4debug.ledger.books import Pages, PoolLedger, on_host
from g4debug.ledger.doubts import Doubts
from g4debug.ledger.page_history import GIVES
from g4debug.sanitizer import unsupported
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.prefix_cache import digests
from g4debug.tracers.prefix_cache.check import (
    Known,
    Violation,
    handed_out,
    handed_over,
    other_than,
    whole_pages,
)
from g4debug.tracers.prefix_cache.confirm import is_real
from g4debug.tracers.prefix_cache.contents import Contents
from g4debug.tracers.prefix_cache.digests import Digests
from g4debug.tracers.prefix_cache.lent_rows import LentRows, State
from g4debug.tracers.prefix_cache.report import MOVED, Case, describe

logger = logging.getLogger("g4debug")
# The prefix caches that are known here. A subclass may keep pages elsewhere.
CACHES = ("SWARadixCache", "RadixCache", "UnifiedRadixCache")
# What the nodes of a cache may keep of their tokens, if more than one kind: nothing else was run.
# The states of linear layers lie in a pool of their own.
KEPT = (("full",), ("full", "swa"), ("full", "mamba"))
STATES = "not the states of linear layers"
FAMILIES = ("radix", "swa", "unified")  # of the hook sites
LOGGED = 8  # suspicions that were not confirmed
ROWS = "not whether a request's row names the pages that the prefix cache lent it"


@dataclass(frozen=True)
class Prompt:
    """The beginning of a prompt: the digests of its pages. request: the one that has this prompt,
    None if it is not known."""

    digests: Digests
    request: Any

    @property
    def rid(self) -> str:
        return "" if self.request is None else str(self.request.rid)


class _Step(NamedTuple):
    """What was judged at the beginning of a step. In most steps it is as it was in the last one."""

    tree: Any
    requests: list[Any]
    rows: list[Any]
    protected: list[Any]
    nodes: list[Any]


class PrefixCacheTracer:
    def __init__(self, context: Context) -> None:
        assert context.ledger is not None, "declared as ledger=True"
        self.context, self.ledger = context, context.ledger
        self.contents = Contents(0)
        self._arrived_over = context.isolate(self._judge_over)
        self._arrived_out = context.isolate(self._judge_out)
        self._inserting: Any = None  # the prefix cache takes over this request's pages now
        self._inserted: Prompt | None = None  # what it has handed over
        # By row: the request, its cache_protected_len and its last node, of which all agreed.
        self._agreed: dict[int, State] = {}
        self._moved: set[int] = set()  # rows whose request has another last node than it had
        self._rows: LentRows | None = None
        self._no_rows = ""  # why no row is compared with the prefix cache
        self._step: _Step | None = None  # as it was judged last
        self._lent: list[int] = []  # tokens of its rows that are compared with the prefix cache
        self._why: dict[int, str] = {}  # by id() of a prefix cache: why it is not judged
        self._unjudged = ""  # why no prefix cache of this server is judged
        self._doubts = 0
        self._row_doubts = Doubts(context.recorder)

    def install(self) -> None:
        context = self.context
        context.before("scheduler.init", self.before_scheduler_init)
        context.after("scheduler.init", self.after_scheduler_init)
        context.before("scheduler.process_result", self.before_result)
        context.before("scheduler.process_result", self.judge_rows)
        context.before("scheduler.on_idle", self.before_idle)
        for family in FAMILIES:
            context.before(f"tree.{family}.insert", self.before_insert, optional=True)
            context.after(f"tree.{family}.match", self.after_match, optional=True)
            context.after(f"tree.{family}.path", self.after_path, optional=True)
            for when, hook in (
                ("finished", self.before_caching),
                ("unfinished", self.before_unfinished),
            ):
                site = f"tree.{family}.{when}"
                context.before(site, hook, optional=True)
                context.after(site, self.after_caching, optional=True)
        for site in ("tree.prefix", "tree.unified.prefix"):
            context.after(site, self.after_prefix, optional=True)
        context.before("scheduler.run_batch", self.before_run)
        context.before("cache.release", self.before_release)
        context.before("batch.evict_swa", self.before_evict)
        kinds = (*GIVES, "free", "clear", "restore")
        self.ledger.listen(self.listen, *kinds, fresh=self.listen_to_fresh)

    # --- which prefix caches -----------------------------------------------------------------

    def before_scheduler_init(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        server_args = argument(args, kwargs, 0, "server_args")
        self._unjudged = unsupported.other_books(server_args)
        topk = server_argument(server_args, "speculative_eagle_topk", 1)
        if topk != 1 and not self._unjudged:
            self._unjudged = f"the draft is a tree (speculative_eagle_topk {topk}), whose tokens "
            self._unjudged += "do not lie in whole pages; this tracer was never run so"
        self._no_rows = unsupported.other_prefixes(server_args)
        if self._unjudged:
            self.context.off(self._unjudged)

    def after_scheduler_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        tree = prefix_tree.innermost(scheduler.tree_cache)
        why = self._refusal(tree)
        if why and not self._unjudged:
            if getattr(tree, "disable", False):
                self.context.nothing(why, off=True)  # a sound server: no alert, exit code 0
            else:
                self.context.off(why)
        else:
            if self._no_rows:
                self.context.limit(ROWS, self._no_rows)
            if "mamba" in _kinds(tree):
                self.context.limit(STATES, "of which a node keeps a copy, and no book is kept")
        return result

    def _judges(self, tree: Any) -> bool:
        if self._unjudged:
            return False
        holders = self.ledger.holders
        allocator = getattr(tree, "token_to_kv_pool_allocator", None)
        if holders is None or allocator is not holders.allocator:
            return False  # SGLang simulates one to order the requests that wait
        why = self._why.get(id(tree))
        if why is None:
            why = self._why[id(tree)] = self._refusal(tree)
        return not why

    def _refusal(self, tree: Any) -> str:
        """Why this prefix cache is not judged, '' if it is."""
        name = type(tree).__name__
        if getattr(tree, "disable", False):
            return "this server keeps no prefix cache"
        kinds = _kinds(tree)
        if name not in CACHES or (kinds and not any({*kinds} == {*kept} for kept in KEPT)):
            of = f" of {' and '.join(kinds)}" if kinds else ""
            known = f"{', '.join(CACHES)}, of {', or '.join(map(' and '.join, KEPT))}"
            return f"the prefix cache is {name}{of} (known: {known})"
        second = [n for n in ("cache_controller", "linker") if getattr(tree, n, None)]
        if second:
            return f"the prefix cache keeps pages in a second level, too (its {second[0]})"
        return ""

    # --- what happens to pages ---------------------------------------------------------------

    def listen(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> None:
        """A page that is freed, or handed out, holds nothing any more."""
        if pool.name != "full" or self._unjudged:
            return
        if self.contents.pages != pool.pages:
            self.contents = Contents(pool.pages)
        if event.kind == "clear":
            self.contents.clear()
        else:
            self.contents.forget(pages)

    def listen_to_fresh(self, pool: PoolLedger, events: Sequence[PageEvent], pages: Pages) -> None:
        """Pages that were handed out one by one, see :meth:`Ledger.enter_each`."""
        self.listen(pool, events[0], pages)

    def before_result(self, *args: Any, **kwargs: Any) -> None:
        # Pages that were handed out for this step are judged before its tokens leave the server.
        self.ledger.settle(wait=True)

    def before_idle(self, *args: Any, **kwargs: Any) -> None:
        self._step = None  # it holds the requests of the last step, and nodes

    # --- a request hands pages over ----------------------------------------------------------

    def before_caching(self, tree: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        self._inserting, self._inserted = request, None
        self._judge_protected(tree, request, "cache.insert")
        tokens = kwargs.get("up_to")
        if tokens is not None:
            self._before_tokens(tree, request, int(tokens))

    def before_unfinished(self, tree: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        self.before_caching(tree, request)
        filled = getattr(request, "get_fill_ids", None)
        self._before_tokens(tree, request, len(filled() if filled else request.fill_ids))

    def _before_tokens(self, tree: Any, request: Any, tokens: int) -> None:
        """SGLang is about to hand over the first ``tokens`` of a request, and may free before that
        what their window does not reach."""
        if self._judges(tree) and not _has_session(request):
            size = int(tree.page_size)
            whole = (tokens - int(_pairs(tree))) // size * size
            self._beyond(tree, Prompt(np.empty(0, dtype=np.uint64), request), whole)

    # --- how much of a request is the prefix cache's ------------------------------------------

    def before_run(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        tree = prefix_tree.innermost(scheduler.tree_cache)
        pool = getattr(batch, "req_to_token_pool", None)
        table = None if pool is None else pool.req_to_token
        if self._rows is None and table is not None and not self._no_rows and self._judges(tree):
            self._rows = LentRows(table)
        rows = self._rows if self._rows is not None and self._rows.table is table else None
        requests = batch.reqs or []
        now = _Step(
            tree,
            list(requests),
            req_kv.values(requests, req_kv.ROW),
            req_kv.values(requests, req_kv.PROTECTED),
            [getattr(request, "last_node", None) for request in requests],
        )
        if now != self._step:
            self._step, self._lent = now, []
            for request in requests:
                self._judge_protected(tree, request, "scheduler.run_batch")
                if rows is not None:
                    self._lent.append(self._learn(tree, rows, request))
        if rows is not None:
            most, every = max(self._lent, default=0), sum(self._lent)
            rows.compare(batch.req_pool_indices if most else None, most)
            if every:
                self.context.checked(every, "tokens of rows compared with the prefix cache")

    def _learn(self, tree: Any, rows: LentRows, request: Any) -> int:
        """Learn what the prefix cache has of a request. How many tokens of its row are compared."""
        row = req_kv.row(request)
        if not 0 <= row < len(rows.table):
            return 0  # spec-lifecycle tells it
        now, known = self._agreed.get(row), rows.known.get(row)
        if now is None or now.rid != request.rid or now.tokens != req_kv.protected(request):
            if known is not None:  # a session's request, or one whose length is wrong
                rows.forget(row)
            return 0
        if known is not None and known.state == now and known.request() is request:
            return 0 if row in rows.told else now.tokens
        self._moved.discard(row)
        same = known is not None and known.request() is request
        if known is not None and same and known.state == now._replace(node=known.state.node):
            self._moved.add(row)
        fits = 0 < now.tokens <= rows.table.shape[1]
        slots = prefix_tree.slots(tree, request) if fits else None
        if slots is None or len(slots) < now.tokens:
            rows.forget(row)
            if now.tokens:
                self.context.limit(
                    ROWS, "of some requests the prefix cache does not tell which pages it has"
                )
            return 0
        rows.learn(row, request, now, slots)
        return now.tokens

    def judge_rows(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """The rows that were wrong when this step began, before its tokens leave the server."""
        rows = self._rows
        for row in () if rows is None else rows.take():
            assert rows is not None
            self._step = None  # the next step learns anew
            self._judge_row(prefix_tree.innermost(scheduler.tree_cache), rows, row)

    def _judge_row(self, tree: Any, rows: LentRows, row: int) -> None:
        """A row is not what the prefix cache has for its first tokens: read both, and tell."""
        known = rows.known.get(row)
        request = None if known is None else known.request()
        cached = 0 if request is None else req_kv.protected(request) or 0
        if known is None or request is None or req_kv.row(request) != row or not cached:
            rows.forget(row)  # the request has left
            return
        slots = prefix_tree.slots(tree, request)
        if slots is None:
            rows.forget(row)
            return
        size, count = int(tree.page_size), min(known.state.tokens, cached, len(slots))
        found = other_than(on_host(rows.table[row, :count]), on_host(slots[:count]), size)
        if found is None:
            rows.forget(row)
            self._doubt_row(row)
            return
        if row in self._moved:
            found = replace(found, got=f"{found.got}; {MOVED}")
        pairs = int(_pairs(tree))
        tokens = _prompt(request, count + pairs)
        made = digests.of_pages(tokens, count // size, size, pairs, _space(request, pairs))
        self._tell(tree, found, Prompt(made, request), site="scheduler.run_batch")
        rows.tell(row)

    def _doubt_row(self, row: int) -> None:
        """A sum said that a row is wrong, and the row itself is right. Stop it if that goes on."""
        count = self._row_doubts.add()
        logger.warning(
            "g4debug: prefix-cache: row %d of req_to_token seemed to differ from what the prefix "
            "cache has, but they are the same, so nothing is reported",
            row,
        )
        if count >= LOGGED:
            self._rows = None
            self._no_rows = f"{count} times a row seemed wrong and was not"
            self.context.limit(ROWS, self._no_rows)

    def before_release(self, request: Any, tree: Any, *args: Any, **kwargs: Any) -> None:
        row = req_kv.row(request)
        self._judge_protected(prefix_tree.innermost(tree), request, "cache.release")
        self._agreed.pop(row, None)
        if self._rows is not None:
            self._rows.leave(row)

    def before_evict(self, batch: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        tree = prefix_tree.innermost(batch.tree_cache)
        self._judge_protected(tree, request, "batch.evict_swa")

    def _judge_protected(self, tree: Any, request: Any, site: str) -> None:
        """``cache_protected_len`` is where the last node ends that the request got or inserted.

        It is asked in each step, so the tree is only looked at where one of the two has changed.
        """
        row, lent = req_kv.row(request), req_kv.protected(request)
        node = getattr(request, "last_node", None)
        # A session's last node stands beside the tree: it has neither an id nor a parent.
        if row < 0 or lent is None or node is None or _has_session(request):
            return
        number = node if isinstance(node, int) else node.id
        now = State(request.rid, lent, number, int(getattr(request, "retraction_count", 0) or 0))
        if self._agreed.get(row) == now or not self._judges(tree):
            return
        held = prefix_tree.end(tree, node)
        if held is None:
            self.context.limit(
                "not whether cache_protected_len is where a request's last node ends",
                "the prefix cache does not tell where its nodes end",
            )
        if held in (None, lent):
            self._agreed[row] = now
            return
        got = f"cache_protected_len = {lent}, and its last node ends at token {held}"
        column = max(0, min(lent, held or 0)) // int(tree.page_size)
        prompt = Prompt(np.empty(0, dtype=np.uint64), request)
        self._tell(tree, Violation("protected", column, -1, got), prompt, site=site)

    def after_caching(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self._inserting = self._inserted = None
        return result

    def before_insert(self, tree: Any, *args: Any, **kwargs: Any) -> None:
        params = argument(args, kwargs, 0, "params")
        key, value = params.key, params.value
        if value is None or key is None or not self._judges(tree):
            return
        request = None if _has_session(self._inserting) else self._inserting
        tokens, pairs, space = _of_key(tree, key)
        size = int(tree.page_size)
        count = min(max(len(tokens) - pairs, 0), len(value)) // size
        if not count:
            return
        prompt = Prompt(digests.of_pages(tokens, count, size, pairs, space), request)
        if self._inserting is not None and self._is_known(prompt):
            return
        if self._inserted is None or len(self._inserted.digests) < count:
            self._inserted = prompt
        self.context.checked(count, "pages handed over")
        if request is not None:
            self._judge_key(tree, prompt, (tokens, pairs, space), count * size + pairs)
        self._beyond(tree, prompt, count * size)
        lent = 0 if request is None else (req_kv.protected(request) or 0) // size
        placed = request is not None and not _was_retracted(request)
        self.ledger.post(
            value[: count * size].contiguous(),
            lambda slots: self._arrived_over(tree, prompt, slots, lent, placed),
        )

    def _is_known(self, prompt: Prompt) -> bool:
        """True if this is a beginning of what the same request has just handed over.

        SGLang hands it over once more only to have a node end there, and looks at no page. By then
        it has freed those that the prefix cache had already.
        """
        known = self._inserted
        made = prompt.digests
        return known is not None and np.array_equal(known.digests[: len(made)], made)

    def _beyond(self, tree: Any, prompt: Prompt, tokens: int) -> None:
        """Judge how many tokens a request hands over, which needs no look at the device."""
        if prompt.request is None:
            return
        has = min(req_kv.committed(prompt.request), req_kv.allocated(prompt.request))
        if tokens > has:
            column = has // int(tree.page_size)
            got = f"it hands over {tokens} tokens, and has KV for {has}"
            self._tell(tree, Violation("beyond", column, -1, got), prompt)

    def _judge_key(
        self, tree: Any, prompt: Prompt, key: tuple[Any, int, object], count: int
    ) -> None:
        """The key of an insert is of the request's own tokens, which needs no look at the device.

        count: tokens of the key that are looked at.
        """
        (have, pairs, space), want = key, _prompt(prompt.request, count)
        at, got = None, ""
        if space != _space(prompt.request, pairs):
            at, got = 0, "its key is in another namespace than the request"
        # SGLang replaces the prompt of a request that it refuses by a single token.
        elif len(want) >= count and have[:count] != want[:count]:
            both = zip(have[:count], want[:count], strict=True)
            at = next((i for i, (a, b) in enumerate(both) if a != b), None)
            got = f"token {at} of its key is not the request's"
        if at is not None:
            column = min(at // int(tree.page_size), len(prompt.digests) - 1)
            self._tell(tree, Violation("other-key", column, -1, got), prompt)

    def _judge_over(self, tree: Any, prompt: Prompt, slots: Pages, lent: int, placed: bool) -> None:
        size, pool = int(tree.page_size), self.ledger.pools["full"]
        if self.contents.pages != pool.pages:
            self.contents = Contents(pool.pages)
        found = whole_pages(slots, size, pool.pages)
        pages = slots[::size] // size
        count = len(pages)
        if found is None:
            known = None if self.ledger.broken else Known(pool.held, pool.owner, pool.position)
            found = handed_over(
                pages, prompt.digests, self.contents, known, prompt.rid, lent, size, placed
            )
            if found is not None and not self._confirmed(tree, found, prompt):
                found = None
        if found is not None:
            count = found.column
            self._tell(tree, found, prompt)
        good = pages[:count]
        step = self.ledger.transport.step
        step = self.context.recorder.event_step if step is None else step
        inside = self.contents.are_pages(good)
        self.contents.put(good[inside], prompt.digests[:count][inside], prompt.rid, step)

    # --- the prefix cache hands pages out ----------------------------------------------------

    def after_match(self, result: Any, tree: Any, *args: Any, **kwargs: Any) -> Any:
        """``match_prefix`` gives slots: up to 0.5.21."""
        params = argument(args, kwargs, 0, "params")
        slots, request = result.device_indices, getattr(params, "req", None)
        if len(slots) and self._judges(tree) and not _has_session(request or self._inserting):
            tokens, pairs, space = _of_key(tree, params.key)
            request = request or self._inserting
            self._out(tree, slots, tokens, pairs, space, request, result.last_device_node)
        return result

    def after_prefix(self, result: Any, tree: Any, request: Any) -> Any:
        """The slots of the prefix that a request was admitted with: from 0.5.23 on."""
        if len(result) and self._judges(tree) and not _has_session(request):
            pairs = int(_pairs(tree))
            tokens = _prompt(request, len(result) + pairs)
            space = _space(request, pairs)
            self._out(tree, result, tokens, pairs, space, request, request.last_node)
        return result

    def after_path(self, result: Any, tree: Any, node: Any) -> Any:
        """The slots that a request's row gets after its insert: from 0.5.23 on."""
        prompt, size = self._inserted, int(tree.page_size)
        if prompt is None or not self._judges(tree) or _has_session(self._inserting):
            return result
        if len(result) > len(prompt.digests) * size:
            return result
        begin = (req_kv.protected(prompt.request) or 0) // size if prompt.request else 0
        self._post_out(tree, result, prompt, node, begin)
        return result

    def _out(
        self, tree: Any, slots: torch.Tensor, tokens: Any, pairs: int, space: object,
        request: Any, node: Any,
    ) -> None:  # fmt: skip
        size = int(tree.page_size)
        count = min(len(slots), max(len(tokens) - pairs, 0)) // size
        made = digests.of_pages(tokens, count, size, pairs, space)
        self._post_out(tree, slots, Prompt(made, request), node)

    def _post_out(
        self, tree: Any, slots: torch.Tensor, prompt: Prompt, node: Any, begin: int = 0
    ) -> None:
        size = int(tree.page_size)
        for one in prefix_tree.path(tree, node):
            if one.slots != one.end - one.begin:
                got = f"node {one.id} has {one.slots} slots for {one.end - one.begin} tokens"
                self._tell(tree, Violation("length", one.begin // size, -1, got), prompt, node)
                return
        end = min(len(slots) // size, len(prompt.digests))
        if end <= begin:
            return
        self.context.checked(end - begin, "pages handed out")
        self.ledger.post(
            slots[begin * size : end * size].contiguous(),
            lambda words: self._arrived_out(tree, prompt, words, begin, node),
        )

    def _judge_out(self, tree: Any, prompt: Prompt, slots: Pages, begin: int, node: Any) -> None:
        size, pool = int(tree.page_size), self.ledger.pools["full"]
        if self.contents.pages != pool.pages:
            self.contents = Contents(pool.pages)
        found = whole_pages(slots, size, pool.pages)
        if found is None:
            pages = slots[::size] // size
            end = begin + len(pages)
            found = handed_out(pages, prompt.digests[begin:end], self.contents)
        if found is None:
            return
        found = Violation(found.kind, found.column + begin, found.page, found.got)
        if self._confirmed(tree, found, prompt):
            self._tell(tree, found, prompt, node)

    # --- what is told ------------------------------------------------------------------------

    def _confirmed(self, tree: Any, violation: Violation, prompt: Prompt) -> bool:
        if self.ledger.broken and KINDS["prefix-cache"][violation.kind].suspicion:
            return False  # frees are not noted any more
        try:
            if is_real(self.ledger, tree, violation, prompt.rid):
                return True
        except Exception as e:
            # A bug of ours costs this finding, and not those about other pages.
            self.context.status.limit(
                "nothing is told of a page about which SGLang's own structures cannot be asked",
                f"{type(e).__name__}: {e}",
                e,
            )
        self._doubts += 1
        if violation.page >= 0:
            self.contents.forget(np.array([violation.page]))
        if violation.kind != "freed-page" and self._doubts <= LOGGED:
            logger.warning(
                "g4debug: prefix-cache: full page %d of request %s seemed to be wrong (%s), but "
                "SGLang's own structures do not confirm it, so nothing is reported",
                violation.page,
                prompt.rid or "?",
                violation.kind,
            )
        return False

    def _tell(
        self, tree: Any, violation: Violation, prompt: Prompt, node: Any = None,
        site: str = "cache.insert",
    ) -> None:  # fmt: skip
        case = Case(
            self.ledger, tree, violation, prompt.rid, prompt.digests, self.contents, node, site
        )

        def make() -> tuple[Finding, Evidence]:
            finding, events = describe(case)
            return finding, Evidence(events=events)

        got = f"full page {violation.page} of request {prompt.rid or '?'}"
        self.context.trap.report(*self.context.described(violation.kind, site, got, make))


def _kinds(tree: Any) -> list[str]:
    """What its nodes keep: one of KEPT, if it is known here; empty where it keeps one kind only."""
    return [str(kind) for kind in getattr(tree, "tree_components", ())]


def _pairs(tree: Any) -> bool:
    """True if the keys of this prefix cache are pairs of tokens, as EAGLE's are."""
    core = getattr(tree, "tree_core", tree)
    return bool(getattr(core, "is_eagle", False))


def _of_key(tree: Any, key: Any) -> tuple[Any, int, object]:
    """The tokens of a key, 1 if it is of pairs (else 0), and its namespace."""
    pairs = int(bool(key.is_bigram) or _pairs(tree))
    tokens = key.raw_token_ids() if hasattr(key, "raw_token_ids") else key.token_ids
    return tokens, pairs, _space(key, pairs)


def _space(of: Any, pairs: int) -> object:
    """The namespace of a key, or of a request's keys."""
    return getattr(of, "extra_key", None), getattr(of, "cache_salt", None) or None, pairs


def _has_session(request: Any) -> bool:
    return getattr(request, "session", None) is not None


def _prompt(request: Any, count: int) -> Any:
    """At least ``count`` tokens of a request, if it has them: its prompt, or its answer, too."""
    tokens = request.origin_input_ids
    return tokens if len(tokens) >= count else tokens + request.output_ids


def _was_retracted(request: Any) -> bool:
    """True if the request has had other pages before: where they were is no evidence."""
    if getattr(request, "is_retracted", False) or getattr(request, "retracted_stain", False):
        return True
    return bool(getattr(request, "retraction_count", 0))


TRACER = Tracer(
    id="prefix-cache",
    title="a node's pages are those that were handed over for its tokens",
    install=lambda context: PrefixCacheTracer(context).install(),
    ledger=True,
    without_ledger="not whether a page that is handed over is free or somebody else's",
    young=True,
)
