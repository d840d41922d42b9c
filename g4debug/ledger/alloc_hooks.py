"""Tells the ledger which pages the allocators' ``alloc*`` methods hand out.

A page is new to the ledger when its first token is handed out. If a sequence continues in a page
that it has, that page is checked: it must still be held in both pools, and its SWA page must be
the one that was paired with it. If not, that is an event of its own ("use", "mismatch").

On a GPU this check needs a copy from the device. So it is made only every ``LOOK`` steps, or if
the ledger says that the last page of a sequence is not held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from g4debug.hooking import req_kv
from g4debug.hooking.arguments import argument
from g4debug.ledger import shadow as shadows
from g4debug.ledger.books import Pages, Pairs, PoolLedger
from g4debug.ledger.callsite import caller
from g4debug.ledger.page_history import SHOWN
from g4debug.ledger.pool_registry import PoolRegistry
from g4debug.ledger.shadow import HELD
from g4debug.ledger.token_rows import NOBODY, Each, Kind, Share, TokenRows
from g4debug.trapping.trap import TrapError

LOOK = 8  # steps between two checks of the pages that sequences continue in, on a GPU
_NONE: Pages = np.empty(0, dtype=np.int64)


# Not frozen: one is made in each step, and to set the fields would take five times as long.
@dataclass(slots=True)
class Plan:
    """Where the pages are among the tokens of an allocation.

    begins, ends: the tokens of each row before the allocation, and after it.
    new: for each new page, the offset of its first token in the allocation.
    positions: for each new page, the position of that token in its request.
    groups: (row of the batch, first, last + 1) of the row's pages in ``new``.
    going_on: for each row that continues in a page that it has, the offset of its first token.
    going_on_rows: those rows.
    """

    lengths: torch.Tensor  # seq_lens_cpu; the SWA allocator passes the same tensor to both pools
    begins: list[int]
    ends: list[int]
    tokens: int
    new: list[int]
    positions: list[int]
    groups: list[tuple[int, int, int]]
    going_on: list[int]
    going_on_rows: list[int]


def plan(begins: list[int], ends: list[int], size: int, source: torch.Tensor) -> Plan:
    """The pages of rows that grow from ``begins`` to ``ends`` tokens."""
    # Lists, because most rows get no page or one: arrays of so few numbers would cost more.
    new: list[int] = []
    positions: list[int] = []
    groups: list[tuple[int, int, int]] = []
    going_on: list[int] = []
    going_on_rows: list[int] = []
    tokens = 0
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        first = begin + -begin % size  # the position of the row's first new page
        if begin < end and begin < first:
            going_on.append(tokens)
            going_on_rows.append(row)
        if first < end:
            known = len(new)
            positions.extend(range(first, end, size))
            new.extend(range(tokens + first - begin, tokens + end - begin, size))
            groups.append((row, known, len(new)))
        tokens += end - begin
    return Plan(source, begins, ends, tokens, new, positions, groups, going_on, going_on_rows)


def rows_of(batch: Any, step: Plan) -> list[int]:
    """The row of ``req_to_token`` of each row of an allocation; [] if there is any doubt.

    The allocation must be the known batch's own: it has as many requests, and it ends (extend) or
    begins (decode, verify) where they stand.
    """
    requests = getattr(batch, "reqs", None) or ()
    at = getattr(batch, "seq_lens_cpu", None)
    if len(requests) != len(step.ends) or at is None:
        return []
    if step.lengths is not at and at.tolist() not in (step.ends, step.begins):
        return []
    rows = req_kv.column(requests, req_kv.ROW)
    return [] if -1 in rows else rows


class AllocHooks:
    """Hooks on ``alloc``, ``alloc_extend``, ``alloc_decode`` and the mapping."""

    def __init__(self, registry: PoolRegistry) -> None:
        self.registry, self.ledger = registry, registry.ledger
        self._out: dict[str, torch.Tensor] = {}  # what the inner allocators handed out last
        self._plan: Plan | None = None
        self._turn = 0  # counts allocations without a new page; every LOOK-th is checked
        self._skips = False  # no check in this step; decided at the full pool, for both pools
        # Pages of the full pool that wait for their SWA pages: new ones, and those continued in.
        self._full: tuple[Pages, Pages] | None = None
        self._tokens: dict[str, Pages] = {}  # the last tokens that were entered, by pool
        self._inside = 0  # above 0 while the SWA allocator allocates in both pools
        self.kind: Kind | None = None  # what ``ledger.allocating`` allocates for, if it is known

    def after_extend(self, out: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        """``alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, ...)``."""
        prefix = argument(args, kwargs, 1, "prefix_lens_cpu")
        lengths = argument(args, kwargs, 3, "seq_lens_cpu")
        self._handed_out(out, allocator, "extend", lengths, prefix)

    def after_decode(self, out: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        """``alloc_decode(seq_lens, seq_lens_cpu, last_loc)``: one token per request."""
        self._handed_out(out, allocator, "decode", argument(args, kwargs, 1, "seq_lens_cpu"))

    def _handed_out(
        self, out: Any, allocator: Any, kind: str, lengths: torch.Tensor, prefix: Any = None
    ) -> None:
        pool = self.registry.pools.get(id(allocator))
        if pool is None:
            return
        self._out.pop(pool.name, None)
        lists = self.registry.lists[id(allocator)]
        lists.ends()
        found = self._plan if pool.name == "swa" else None
        if found is None or found.lengths is not lengths:
            ends = lengths.tolist()
            begins = [n - 1 for n in ends] if prefix is None else prefix.tolist()
            found = self._plan = plan(begins, ends, pool.page_size, lengths)
        if out is None:
            self._exhausted(pool, kind, found.tokens)
            return
        self._out[pool.name] = out
        if found.new:
            self._hold(pool, out)
            self._own(pool, out, found)
        elif not found.going_on or self._may_skip(pool, out, found):
            return
        step, requests = found, self._requests(len(found.ends))
        rids = self._rids(step, (row for row, _, _ in step.groups))
        shares = [
            Share(rid, first, end, step.positions[first:end])
            for rid, (_, first, end) in zip(rids, step.groups, strict=True)
        ]
        where = caller() if step.new else ""
        lists.called += 1
        tails = []
        if self.ledger.is_far(out) and not step.new:
            tails = self._rids(step, step.going_on_rows)

        def enter(tokens: Pages) -> None:
            lists.entered += 1
            going_on = tokens[step.going_on] // pool.page_size if step.going_on else _NONE
            pages = tokens[step.new] // pool.page_size if step.new else _NONE
            holders = self.ledger.holders
            if holders is not None and requests and not self.ledger.late:
                # The rows are not written yet beyond what they had.
                holders.growing = requests, step.begins
            try:
                _all(
                    partial(self._strays, pool, kind, tokens, where, going_on, pages),
                    partial(self._use, pool, kind, going_on, step, pages),
                    *self._entries(pool, kind, pages, shares, where),
                    partial(self._pair, pool, pages, going_on, tokens),
                )
            finally:
                if holders is not None:
                    holders.growing = (), ()
            for rid, page in zip(tails, going_on.tolist(), strict=False):
                pool.ends_in(rid, page)

        self.ledger.post(out, self.registry.once(enter))

    def _strays(
        self, pool: PoolLedger, kind: str, tokens: Pages, where: str, *looked_at: Pages
    ) -> None:
        """Enter the pages of tokens that the pool does not have, but for pages looked at anyway.

        SGLang uses each token as an index right after, and dies. Of the tokens that the pool has,
        the first one stands for its page.
        """
        strays = pool.outside(tokens)
        if len(strays) and len(strays := np.setdiff1d(strays, np.concatenate(looked_at))):
            self.ledger.enter(pool, kind, strays, holds=True, caller=where)

    def _entries(
        self, pool: PoolLedger, kind: str, pages: Pages, shares: Iterable[Share], where: str
    ) -> Iterator[Callable[[], Any]]:
        """Functions that enter the hand-out of these shares of the new pages."""
        enter = partial(self.ledger.enter, pool, kind, holds=True, caller=where)
        for share in shares:
            given = pages[share.first : share.end]
            yield partial(enter, given, request=share.rid, positions=share.positions)

    def _one_each(self, pool: PoolLedger, kind: str, pages: Pages, each: Each, where: str) -> None:
        """Enter that each request got one of these pages, in their order."""
        rids, positions = each.rids, each.positions
        alike = len(pages) == len(rids)
        if not alike or not self.ledger.enter_each(pool, kind, pages, rids, positions, where):
            _all(*self._entries(pool, kind, pages, each.shares(), where))

    def _may_skip(self, pool: PoolLedger, out: torch.Tensor, step: Plan) -> bool:
        """True if the pages that the rows continue in need no check this time."""
        if pool.name != "swa":
            self._turn += 1
            full, swa = pool, self.ledger.pools.get("swa")
            self._skips = (
                self.ledger.is_far(out)
                and self._turn % LOOK != 0
                and all(
                    known.held[known.tails.get(rid, 0)]
                    for rid in self._rids(step, step.going_on_rows)
                    for known in ((full,) if swa is None else (full, swa))
                )
            )
        return self._skips

    def _rids(self, step: Plan, rows: Iterable[int]) -> list[str]:
        """rid of each of these rows of the batch; '' if it is not known."""
        requests = self._requests(len(step.ends))
        return [str(requests[row].rid) if requests else "" for row in rows]

    def _use(self, pool: PoolLedger, kind: str, pages: Pages, step: Plan, new: Pages) -> None:
        """Enter it if a row continues in a page that is not held.

        Not where a new page is held already: then the rows may have each other's tokens, and that
        hand-out is judged by itself.
        """
        loose = pool.not_held(pages)
        if len(loose) and len(pool.not_held(new)) == len(new):
            row = step.going_on_rows[int((pages == loose[0]).argmax())]
            (rid,), note = self._rids(step, [row]), f"alloc_{kind}"
            self.ledger.enter(pool, "use", loose, holds=None, request=rid, note=note)

    def after_alloc(self, out: Any, allocator: Any, need_size: int) -> None:
        """``alloc(need_size)`` hands out whole pages, or tokens if a page is one token."""
        pool = self.registry.pools.get(id(allocator))
        if pool is None:
            return
        self._out.pop(pool.name, None)
        lists = self.registry.lists[id(allocator)]
        lists.ends()
        if out is None:
            self._exhausted(pool, "alloc", int(need_size))
            return
        self._out[pool.name] = out
        self._hold(pool, out)
        where = caller()
        batch, kind = self.ledger.allocating, self.kind
        by_token = pool.page_size == 1 and batch is not None
        rows = TokenRows(batch, kind) if by_token and kind is not None else None
        each = rows.each(int(need_size)) if rows is not None else None
        shares: tuple[Share, ...] = ()
        if each is None:
            shares = (rows.shares(int(need_size)) if rows is not None else ()) or (NOBODY,)
        if pool.name == "full":
            self._own_tokens(out, pool.page_size, shares, each)
        if rows is not None and any(share.positions is None for share in shares):
            self.ledger.status.limit(
                "whose token is in a page, and which one",
                "a page is one token, and SGLang's batch does not tell it of a draft that is a "
                "tree or that allocates ahead; such pages are only counted",
            )

        lists.called += 1

        def enter(tokens: Pages) -> None:
            lists.entered += 1
            pages = tokens[:: pool.page_size] // pool.page_size
            strays = partial(self._strays, pool, "alloc", tokens, where, pages)
            entries: Iterable[Callable[[], Any]]
            if each is None:
                entries = self._entries(pool, "alloc", pages, shares, where)
            else:
                entries = (partial(self._one_each, pool, "alloc", pages, each, where),)
            _all(strays, *entries, partial(self._pair, pool, pages, _NONE, tokens))

        self.ledger.post(out, self.registry.once(enter))

    def _hold(self, pool: PoolLedger, out: torch.Tensor) -> None:
        """Mark new pages in the shadow, unless the pairing with SWA pages does it later."""
        if "swa" not in self.ledger.pools:
            shadows.mark(self.ledger.shadow, out, pool.page_size, HELD, begins=True)

    def _own(self, pool: PoolLedger, out: torch.Tensor, step: Plan) -> None:
        """Note for which rows of ``req_to_token`` new pages of the full pool were handed out."""
        owners = self.ledger.owners
        if owners is None or pool.name != "full":
            return
        known = rows_of(self.ledger.allocating, step) or [0] * len(step.ends)
        rows = [known[r] for r, a, b in step.groups for _ in range(a, b)]
        size = pool.page_size
        owners.give(out, step.new, rows, [position // size for position in step.positions])

    def _own_tokens(
        self, out: torch.Tensor, page_size: int, shares: Sequence[Share], each: Each | None
    ) -> None:
        """The same for whole pages, of which it is only known for whom they are if ``shares`` say.

        With those, and with ``each``, a page is one token.
        """
        owners = self.ledger.owners
        if owners is None:
            return
        if each is not None:
            owners.give(out, list(range(len(each.rows))), each.rows, each.positions.tolist())
            return
        rows, columns = [], []
        for share in shares:
            if share.positions is None:
                shadows.mark(owners.pages, out, page_size, 0, begins=True)
                return
            rows += [share.row] * len(share.positions)
            columns += list(share.positions)
        owners.give(out, list(range(len(rows))), rows, columns)

    def _exhausted(self, pool: PoolLedger, kind: str, tokens: int) -> None:
        self.ledger.settle(wait=True)
        note = f"no room for {tokens} tokens"
        self.ledger.enter(pool, kind, _NONE, holds=None, caller=caller(), note=note)

    def _pair(self, pool: PoolLedger, pages: Pages, going_on: Pages, tokens: Pages) -> None:
        """Pair pages of the two pools: both got the same positions, the full pool first."""
        self._tokens[pool.name] = tokens
        if pool.name == "full":
            self._full = (pages, going_on)
            return
        if self._full is None:  # SWA pages without full pages (HiCache); set_mapping pairs them
            return
        full = self.ledger.pools["full"]
        new, before = self._full
        self._full = None
        if len(new) != len(pages) or len(before) != len(going_on):
            full.partner[full.inside(new)] = -1  # SWA pages for a sequence's tail only
            return
        if len(new):
            full.pair(new, pool, pages)
        known = full.partner.take(before, mode="clip")
        wrong = known != going_on
        if wrong.any():
            wrong &= known >= 0
            if wrong.any():
                self._mismatch(full, before[wrong], known[wrong], going_on[wrong])

    def around_swa_alloc(self, call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """From 0.5.14 on, an allocation writes the mapping by ``set_full_to_swa_mapping``."""
        self._inside += 1
        self._out.clear()  # should the call of one pool be missed, the last one's is not meant
        try:
            return call_next(*args, **kwargs)
        finally:
            self._inside -= 1

    def after_swa_extend(self, out: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        """``alloc_extend(prefix_lens, ..., seq_lens_cpu, last_loc, ...)``."""
        self.after_swa_alloc(out, allocator, argument(args, kwargs, 4, "last_loc"))

    def after_swa_decode(self, out: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        """``alloc_decode(seq_lens, seq_lens_cpu, last_loc)``."""
        self.after_swa_alloc(out, allocator, argument(args, kwargs, 2, "last_loc"))

    def after_swa_alloc(self, out: Any, allocator: Any, last: Any = None) -> None:
        """Both pools have allocated: write the SWA page of each full page into the shadow.

        last: int64 [rows], the index of the last token that each sequence has, if it is a tensor.
        """
        full, swa, step = self._out.get("full"), self._out.get("swa"), self._plan
        self._plan = None
        if out is not None and full is not None and out is not full:
            self._returned(full, out, last if isinstance(last, torch.Tensor) else full[:0])
        if out is None or full is None or swa is None or self.ledger.shadow is None:
            return
        if step is not None and not step.new:  # no new page
            return
        pool = self.ledger.pools["full"]
        # Not the pages that rows continue in: if one was freed, it must not look held.
        shadows.mark(self.ledger.shadow, full, pool.page_size, swa=swa, begins=True)

        def written(words: Pages) -> None:
            """Compare SGLang's new mapping entries with the pages that were handed out."""
            mapped = words.reshape(2, -1)[1]
            given = self._tokens["swa"]
            wrong = mapped != given
            if wrong.any():
                size = pool.page_size
                pages, first = np.unique(self._tokens["full"][wrong] // size, return_index=True)
                self._mismatch(
                    pool,
                    pages,
                    given[wrong][first] // size,
                    mapped[wrong][first] // size,
                    kind="miswritten",
                )

        self.ledger.post(full, self.registry.once(written), allocator.full_to_swa_index_mapping)

    def after_set_mapping(self, result: Any, allocator: Any, full: Any, swa: Any) -> None:
        """Pair pages that were allocated one by one, or that go over. 0 means no SWA page."""
        pool, swa_pool = self.ledger.pools["full"], self.ledger.pools["swa"]
        if self._inside or full.numel() == 0:
            return
        shadows.mark(self.ledger.shadow, full, pool.page_size, swa=swa)
        where = caller()

        def enter(words: Pages) -> None:
            tokens, theirs = words.reshape(2, -1)
            pages, first = np.unique(tokens // pool.page_size, return_index=True)
            partner = theirs[first] // pool.page_size
            pool.partner[pool.inside(pages)] = 0
            pool.pair(pages, swa_pool, partner)
            self.ledger.enter(pool, "map", pages, holds=None, caller=where)
            self.ledger.enter(swa_pool, "map", partner, holds=None, caller=where)

        both = torch.cat((full.to(torch.int64), swa.to(torch.int64)))
        self.ledger.post(both, self.registry.once(enter))

    def _mismatch(
        self, pool: PoolLedger, pages: Pages, given: Pages, got: Pages, kind: str = "mismatch"
    ) -> None:
        """Enter that the mapping of these full pages differs from the pages that were handed out.

        kind: "miswritten" if it was so at once, "mismatch" if it was right when they were.
        """
        pairs = list(zip(pages.tolist(), given.tolist(), got.tolist(), strict=True))
        note = "; ".join(
            f"page {p} has SWA page {g}, but the mapping says {m}" for p, g, m in pairs[:SHOWN]
        )
        self.ledger.pairs = Pairs(pages, given, got)
        try:
            self.ledger.enter(pool, kind, pages, holds=None, caller=caller(), note=note)
        finally:
            self.ledger.pairs = None

    def _returned(self, full: torch.Tensor, out: torch.Tensor, last: torch.Tensor) -> None:
        """The SWA allocator returned other indices than its full pool had handed out: enter them.

        Pages in which sequences continue are left out: SGLang itself names these, in ``last``.
        """
        pool, parts = self.ledger.pools["full"], (out, full, last)
        counts = np.cumsum([part.numel() for part in parts])
        together = torch.cat([part.reshape(-1).to(torch.int64) for part in parts])

        def enter(tokens: Pages) -> None:
            got, given, ends = np.split(tokens, counts[:-1])
            ends = ends[(ends + 1) % pool.page_size != 0]  # a full page is not continued in
            known = np.concatenate([given, ends]) // pool.page_size
            pages = np.setdiff1d(got // pool.page_size, known)
            if len(pages):
                handed = np.unique(given // pool.page_size)[:SHOWN].tolist()
                note = f"the full pool had handed out {', '.join(map(str, handed))}"
                self.ledger.enter(pool, "returned", pages, holds=None, caller=caller(), note=note)

        self.ledger.post(together, self.registry.once(enter))

    def _requests(self, rows: int) -> Sequence[Any]:
        """The requests that are allocated for, () if they are not known."""
        batch = self.ledger.allocating
        return batch.reqs if batch is not None and len(batch.reqs) == rows else ()


def _all(*entries: Callable[[], Any]) -> None:
    """Make all of these entries, because all of it has happened; then raise the first finding."""
    first: TrapError | None = None
    for enter in entries:
        try:
            enter()
        except TrapError as e:
            first = first or e
    if first is not None:
        raise first
