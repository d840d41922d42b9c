"""Corrupts a scheduler once, inside of all hooks of g4debug, as a Corruption says.

SGLang's functions are replaced before it loads its plugins. So g4debug wraps the replacements, and
sees the corruption as if SGLang itself had made it.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from g4debug.hooking import req_kv, targets
from suites.fuzz.books import Books, attribute, in_tensor, tokens_to
from suites.fuzz.corruption import (
    ALLOCATE,
    FORWARD,
    FUTURE,
    MATCH,
    METADATA,
    PLAN,
    PREFILLS,
    RESULT,
    ROTATE,
    STEP,
    SWAP,
    VALUE,
    VERIFIED,
    VERIFY,
    Corruption,
)
from suites.fuzz.places import AHEAD, MIDDLE, UNFINISHED, Change, Place, Row

T = TypeVar("T")
MODE_OF = {"TARGET_VERIFY": "DECODE"}  # what a forward is called -> the mode of its batch
FAR = 1 << 20  # further than any pool, row, length or vocabulary of the toy model
CACHES = (
    "unified_radix_cache.UnifiedRadixCache",
    "swa_radix_cache.SWARadixCache",
    "radix_cache.RadixCache",
)


class Strike(Books):
    """fired: the change that was made, None before it. Its step is the first one that can feel it:
    if it is known for which request it is read, the first from then on with that request.

    step: returns the step since the begin. coming: the same, and the next one while that is being
    prepared.
    """

    def __init__(
        self,
        case: Corruption,
        scheduler: Any,
        step: Callable[[], int],
        coming: Callable[[], int] | None = None,
    ) -> None:
        if case.what == "node" and nodes(scheduler.tree_cache) is None:
            case = replace(case, moment=MATCH, step=min(case.step, PREFILLS))
        self.case, self.scheduler, self.step = case, scheduler, step
        self.coming = coming or step
        self.fired: dict[str, Any] | None = None
        self.failed = ""  # why this cannot strike, a mistake of ours
        self.on_fire: Callable[[dict[str, Any]], None] = lambda fired: None
        self.requests: dict[str, Any] = {}  # by rid: all that were in a batch
        self.waits_for: tuple[str, ...] = ()  # no step since the change had one of these requests
        self.computed: dict[str, int] = {}  # by rid: tokens whose KV was there after its last step

    def at(self, moment: str, mode: str = "", **of: Any) -> None:
        """SGLang is at this moment. of: the objects that its function has there."""
        for request in getattr(of.get("batch"), "reqs", None) or ():
            self.requests.setdefault(str(request.rid), request)
        if moment == RESULT:
            for request in getattr(of.get("batch"), "reqs", None) or ():
                now = getattr(req_kv.holder(request, req_kv.COMMITTED), req_kv.COMMITTED, 0)
                self.computed[str(request.rid)] = int(now)
        self._felt(moment, of.get("batch"))
        try:
            self._strike(moment, mode, **of)
        except Exception as e:  # a mistake in here is no bug of SGLang's
            self.failed = f"{type(e).__name__}: {e}"

    def _strike(self, moment: str, mode: str, **of: Any) -> None:
        case = self.case
        if self.failed:
            return
        if self.fired is not None or moment != case.moment or self.step() < case.step:
            return
        if case.mode and mode and case.mode != MODE_OF.get(mode, mode):
            return
        change = {VALUE: self._one, SWAP: self._two, ROTATE: self._rotated}[case.form](**of)
        if change is None:
            return
        if change.put is None:
            change.tensor[change.index] = change.value
        else:
            changed = change.tensor.clone()
            changed[change.index] = change.value
            change.put(changed)
        # What is done before a batch is chosen belongs to that batch's step.
        step = self.step() + 1 if moment in (PLAN, MATCH) else self.coming()
        self.fired = {"step": step, "mode": mode, "words": change.words, "note": change.note}
        self.waits_for = change.rids
        self._felt(moment, of.get("batch"))
        self.on_fire(self.fired)

    def _felt(self, moment: str, batch: Any) -> None:
        """Note the first step that can feel the change."""
        if self.fired is None or moment != STEP or not self.waits_for:
            return
        mode = getattr(batch, "forward_mode", None)
        if self.case.what == "future" and (mode is None or mode.is_extend()):
            return  # a prefill only writes there
        if {str(r.rid) for r in getattr(batch, "reqs", None) or ()} & {*self.waits_for}:
            self.fired["step"], self.waits_for = self.coming(), ()

    def _places(self, **of: Any) -> Iterator[Place]:
        found: Iterator[Place] = getattr(self, f"_{self.case.what}")(**of)
        return found

    def _one(self, **of: Any) -> Change | None:
        """A wrong value for one number."""
        place = chosen([p for p in self._places(**of) if self._wanted(p) is not None], self.case)
        if place is None:
            return None
        old, new = place.tensor[place.index].item(), self._wanted(place)
        words = f"{place.words}: {old} -> {new}"
        rids = (place.rid,) if place.rid else ()
        return Change(place.tensor, place.index, new, words, place.put, place.note, rids)

    def _two(self, **of: Any) -> Change | None:
        """Two numbers, swapped."""
        every = [(p, p.tensor[p.index].item()) for p in self._places(**of)]
        pairs = [
            (p, old, [(q, new) for q, new in every if q.tensor is p.tensor and new != old])
            for p, old in every
        ]
        found = chosen([pair for pair in pairs if pair[2]], self.case)
        if found is None:
            return None
        p, old, others = found
        q, new = others[min(int(self.case.other * len(others)), len(others) - 1)]
        index = tuple(torch.tensor(both) for both in zip(p.index, q.index, strict=True))
        value = p.tensor[index].flip(0)
        words = f"{p.words}: {old} -> {new}, {q.words}: {new} -> {old}"
        note, rids = p.note if p.note == q.note else "", (p.rid, q.rid) if p.rid and q.rid else ()
        return Change(p.tensor, index, value, words, p.put, note, rids)

    def _rotated(self, **of: Any) -> Change | None:
        """The pages of a row, each in the place of the one before it."""
        rows: Iterator[Row] = getattr(self, f"_{self.case.what}_pages")(**of)
        differ = [(r, r.tensor[r.index].roll(-r.unit)) for r in rows]
        found = chosen(
            [x for x in differ if not torch.equal(x[1], x[0].tensor[x[0].index])], self.case
        )
        if found is None:
            return None
        row, value = found
        words = f"{row.words}: {len(value) // row.unit} pages, rotated by one"
        rids = (row.rid,) if row.rid else ()
        return Change(row.tensor, row.index, value, words, row.put, row.note, rids)

    def _wanted(self, place: Place) -> int | None:
        """The value that was drawn; None if there is none here that differs."""
        old = place.tensor[place.index].item()
        fixed = {"zero": 0, "minus_one": -1, "outside": FAR, "next": int(old) + 1}
        value = place.values.get(self.case.to, fixed.get(self.case.to))
        return None if value is None or value == old else value

    # --- what there is to choose from ----------------------------------------------------------

    @property
    def table(self) -> torch.Tensor:
        found: torch.Tensor = self.scheduler.req_to_token_pool.req_to_token
        return found

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    def is_computed(self, request: Any, at: int) -> bool:
        """True if the KV of a request's token ``at`` is there."""
        return at < max(self.computed.get(str(request.rid), 0), req_kv.prefix(request))

    def read_later(self, request: Any, at: int) -> str:
        """The note on a request's token ``at`` in what page tables and lists are made of."""
        if not self.is_computed(request, at):
            return AHEAD
        by_pages = str(self.scheduler.server_args.attention_backend) == "trtllm_mha"
        return MIDDLE if by_pages and at % self.page else ""

    def inner(self, pool: str) -> Any:
        return getattr(self.allocator, f"{pool}_attn_allocator", self.allocator)

    def live(self) -> list[tuple[Any, int, int]]:
        """(request, row, allocated tokens) of each that has KV now."""
        rows = ((r, req_kv.row(r), req_kv.allocated(r)) for r in self.requests.values())
        return [(r, row, n) for r, row, n in rows if row >= 0 and n > 0]

    def one(self) -> tuple[Any, int, int] | None:
        live = self.live()
        return live[min(int(self.case.request * len(live)), len(live) - 1)] if live else None

    def tokens(self, row: int, length: int, pool: str) -> list[int]:
        """Where the tokens of a row are in a pool."""
        full = self.table[row, :length].long()
        mapping = getattr(self.allocator, "full_to_swa_index_mapping", None)
        if pool == "swa" and mapping is not None:
            full = mapping[full.clamp(0, len(mapping) - 1)]
        return [int(n) for n in full]

    def values(self, row: int, at: int, pool: str, unit: int = 1) -> dict[str, int]:
        """The wrong values for the place of a row's token ``at``, in units of so many tokens."""
        lengths = {r: n for _, r, n in self.live()}
        own = self.tokens(row, lengths.get(row, 0), pool)
        found: dict[str, int] = {"outside": FAR}
        other = next((r for r in lengths if r != row), None)
        if other is not None:
            theirs = self.tokens(other, lengths[other], pool)
            found["other"] = theirs[min(at, len(theirs) - 1)] // unit
        far = next((n for i, n in enumerate(own) if n // self.page != own[at] // self.page), None)
        if far is not None:
            found["own"] = far // unit
        free = self.inner(pool).free_pages
        if len(free):
            found["freed"] = int(free[-1]) * self.page // unit
        return found

    def positions_of(self, length: int) -> Iterator[int]:
        """Tokens of a row, one in each page, at the drawn slot."""
        slot = {"first": 0, "middle": self.page // 2, "last": self.page - 1}[self.case.slot]
        yield from (n for n in range(slot, length, self.page))
        if slot >= length:
            yield length - 1

    # --- one method for each structure ---------------------------------------------------------

    def _row(self, **of: Any) -> Iterator[Place]:
        if (one := self.one()) is not None:
            request, row, length = one
            for at in self.positions_of(length):
                words = f"req_to_token[{row}, {at}] of {request.rid}"
                values = self.values(row, at, "full")
                note, rid = self.read_later(request, at), str(request.rid)
                yield Place(self.table, (row, at), values, words, note=note, rid=rid)

    def _row_pages(self, **of: Any) -> Iterator[Row]:
        for request, row, length in self.live():
            words = f"req_to_token[{row}] of {request.rid}"
            whole = slice(length // self.page * self.page)
            yield Row(self.table, (row, whole), self.page, words, rid=str(request.rid))

    def _mapping(self, **of: Any) -> Iterator[Place]:
        mapping = getattr(self.allocator, "full_to_swa_index_mapping", None)
        if mapping is None or (one := self.one()) is None:
            return
        request, row, length = one
        for at in self.positions_of(length):
            slot = int(self.table[row, at])
            if int(mapping[slot]) > 0:  # behind the window there is none
                words = f"mapping[{slot}], token {at} of {request.rid}"
                values = self.values(row, at, "swa")
                note, rid = self.read_later(request, at), str(request.rid)
                yield Place(mapping, (slot,), values, words, note=note, rid=rid)

    def _mapping_pages(self, **of: Any) -> Iterator[Row]:
        mapping: Any = getattr(self.allocator, "full_to_swa_index_mapping", None)
        for request, row, length in self.live() if mapping is not None else ():
            slots = self.table[row, : length // self.page * self.page].long()
            slots = slots[mapping[slots] > 0]
            slots = slots[: len(slots) // self.page * self.page]
            words = f"mapping of the slots of {request.rid}"
            yield Row(mapping, slots, self.page, words, rid=str(request.rid))

    def _table(self, backend: Any = None, batch: Any = None, **of: Any) -> Iterator[Place]:
        made = getattr(backend, "forward_metadata", None)
        lengths = getattr(batch, "seq_lens", None)
        rows = getattr(batch, "req_pool_indices", None)
        if made is None or lengths is None or rows is None:
            return
        swa = self.case.pool == "swa"
        table = getattr(made, "swa_page_table" if swa else "page_table", None)
        if table is not None:
            for r, row in enumerate(rows.tolist()):
                for at in self.positions_of(int(lengths[r])):
                    column = at // self.page
                    if column < table.shape[1] and int(table[r, column]) > 0:
                        words = f"{self.case.pool} page table[{r}, {column}]"
                        values = self.values(row, at, self.case.pool, self.page)
                        yield Place(table, (r, column), values, words)
            return
        part = "window_" if swa else ""
        indices = getattr(made, f"{part}kv_indices", None)
        indptr = getattr(made, f"{part}kv_indptr", None)
        if indices is None or indptr is None:
            return
        for r, row in enumerate(rows.tolist()):
            begin, end = int(indptr[r]), int(indptr[r + 1])
            for at in range(begin, end, max(1, (end - begin) // 4)):
                words = f"{self.case.pool} list[{at}] of row {r}"
                yield Place(indices, (at,), self.values(row, 0, self.case.pool), words)

    def _table_pages(self, backend: Any = None, batch: Any = None, **of: Any) -> Iterator[Row]:
        made, page = getattr(backend, "forward_metadata", None), self.page
        lengths, swa = getattr(batch, "seq_lens", None), self.case.pool == "swa"
        if made is None or lengths is None:
            return
        table: Any = getattr(made, "swa_page_table" if swa else "page_table", None)
        for r, length in enumerate(lengths.tolist() if table is not None else ()):
            columns = range(min(length // page, table.shape[1]))
            first = next((c for c in columns if int(table[r, c]) > 0), len(columns))
            words = f"{self.case.pool} page table[{r}]"
            yield Row(table, (r, slice(first, len(columns))), 1, words)
        part = "window_" if swa else ""
        indices = getattr(made, f"{part}kv_indices", None)
        indptr = getattr(made, f"{part}kv_indptr", None)
        if indices is None or indptr is None:
            return
        for r in range(len(lengths)):
            begin, end = int(indptr[r]), int(indptr[r + 1])
            words = f"{self.case.pool} list of row {r}"
            yield Row(indices, (slice(begin, begin + (end - begin) // page * page),), page, words)

    def _out_cache_loc(self, batch: Any = None, **of: Any) -> Any:
        one = self.one()
        given = {} if one is None else self.values(one[1], 0, "full")
        yield from in_tensor(batch, "out_cache_loc", lambda n: given)

    def _seq_lens(self, batch: Any = None, **of: Any) -> Any:
        lens: Any = getattr(batch, "seq_lens", None)

        def values(n: int) -> dict[str, int]:
            found = {"own": max(1, int(lens[n]) // 2), "freed": int(lens[n]) + self.page}
            return found | ({"other": int(lens[n - 1])} if len(lens) > 1 else {})

        yield from in_tensor(batch, "seq_lens", values)

    def _req_pool_indices(self, batch: Any = None, **of: Any) -> Any:
        rows: Any = getattr(batch, "req_pool_indices", None)
        free = self.scheduler.req_to_token_pool.free_slots

        def values(n: int) -> dict[str, int]:
            found = {"freed": int(free[-1])} if len(free) else {}
            return found | ({"other": int(rows[n - 1])} if len(rows) > 1 else {})

        yield from in_tensor(batch, "req_pool_indices", values)

    def _node(self, **of: Any) -> Iterator[Place]:
        if self.case.moment == MATCH:
            yield from self._matched(**of)
            return
        held = nodes(self.scheduler.tree_cache) or []
        for name, value in held:
            values: dict[str, int] = {}
            other = next((v for _, v in held if v is not value), None)
            if other is not None:
                values["other"] = int(other[0])
            if len(value) > self.page:
                values["own"] = int(value[-1])
            free = self.inner("full").free_pages
            if len(free):
                values["freed"] = int(free[-1]) * self.page
            # To be swapped with, there must be a second one.
            for at in range(0, len(value), self.page) if self.case.form == SWAP else (0,):
                yield Place(value, (at,), values, f"value[{at}] of node {name}")

    def _node_pages(self, returned: Any = None, put: Any = None, **of: Any) -> Iterator[Row]:
        page = self.page
        if self.case.moment == MATCH:
            if isinstance(returned, torch.Tensor):
                whole = slice(len(returned) // page * page)
                yield Row(returned, (whole,), page, "the tokens of a match", put)
            return
        for name, value in nodes(self.scheduler.tree_cache) or []:
            yield Row(value, (slice(len(value) // page * page),), page, f"the value of node {name}")

    def _matched(self, returned: Any = None, put: Any = None, **of: Any) -> Iterator[Place]:
        """Places in the cache's hand-out: tokens of the full pool, one for each of the prompt."""
        one = self.one()
        if not isinstance(returned, torch.Tensor) or not len(returned):
            return
        values = {} if one is None else self.values(one[1], 0, "full")
        values["own"] = int(returned[-1])
        for at in self.positions_of(len(returned)):
            yield Place(returned, (at,), values, f"token {at} of a match", put)

    def _free_list(self, **of: Any) -> Iterator[Place]:
        free, one = self.inner(self.case.pool).free_pages, self.one()
        if not len(free):
            return
        values = {} if one is None else self.values(one[1], 0, self.case.pool, self.page)
        values["freed"] = int(free[-1])
        yield Place(free, (0,), values, f"the next free page of the {self.case.pool} pool")

    def _protected(self, **of: Any) -> Iterator[Place]:
        if (one := self.one()) is None:
            return
        holder = req_kv.holder(one[0], req_kv.PROTECTED)
        now = getattr(holder, req_kv.PROTECTED, None)
        if not isinstance(now, int):
            return
        values = {"other": now + self.page, "own": max(0, now - self.page), "freed": one[2]}
        words = f"cache_protected_len of {one[0].rid}"
        yield attribute(holder, req_kv.PROTECTED, values, words)

    def _alloc(self, returned: Any = None, put: Any = None, **of: Any) -> Iterator[Place]:
        one = self.one()
        if isinstance(returned, torch.Tensor):
            values = {} if one is None else self.values(one[1], 0, "full")
            for n in range(len(returned)):
                yield Place(returned, (n,), values, f"allocated[{n}]", put)

    def _draft_tokens(self, batch: Any = None, **of: Any) -> Any:
        yield from in_tensor(getattr(batch, "spec_info", None), "draft_token", tokens_to)

    def _positions(self, batch: Any = None, **of: Any) -> Any:
        owner = batch if self.case.moment == FORWARD else getattr(batch, "spec_info", None)
        yield from in_tensor(owner, "positions", lambda n: {"other": 7, "own": 1, "freed": 3})

    def _accept_lens(self, returned: Any = None, **of: Any) -> Any:
        more = {"other": 2, "own": 1, "freed": 3}
        for name in ("accept_lens", "accept_length_per_req_cpu", "accept_length"):
            yield from in_tensor(returned, name, lambda n: more)

    def _next_tokens(self, returned: Any = None, **of: Any) -> Any:
        yield from in_tensor(returned, "next_token_ids", tokens_to)

    def _future(self, **of: Any) -> Iterator[Place]:
        future = getattr(self.scheduler, "future_map", None)
        live = self.live()
        for name in FUTURE:
            tensor = getattr(future, name, None)
            if isinstance(tensor, torch.Tensor) and live:
                values = {"other": int(tensor[live[0][1]]), "own": 5, "freed": 7}
                # To be swapped with, there must be a second one.
                for request, row, _ in live if self.case.form == SWAP else (self.one() or live[0],):
                    words = f"{name}[{row}] of {request.rid}"
                    yield Place(tensor, (row,), values, words, rid=str(request.rid))

    def _kv(self, **of: Any) -> Iterator[Place]:
        if (one := self.one()) is None:
            return
        pool = self.inner(self.case.pool).get_kvcache()
        pool = getattr(pool, f"{self.case.pool}_kv_pool", pool)
        request, row, length = one
        first = pool.k_buffer[0].view(len(pool.k_buffer[0]), -1)
        for at in self.positions_of(length - 1):
            slot = self.tokens(row, length, self.case.pool)[at]
            if slot > 0:
                words = f"K of slot {slot} ({self.case.pool}), token {at} of {request.rid}"
                values = {"other": 3, "own": 5, "freed": 9}
                last = at // self.page * self.page + self.page - 1
                note = "" if self.is_computed(request, last) else UNFINISHED
                yield Place(first, (slot, 0), values, words, note=note)


def chosen(found: Sequence[T], case: Corruption) -> T | None:
    """The one that the case draws, None if there is none."""
    return found[min(int(case.place * len(found)), len(found) - 1)] if found else None


def nodes(tree: Any) -> list[tuple[str, torch.Tensor]] | None:
    """The nodes of a prefix cache, each with the tokens that it holds, in a fixed order.

    None if nobody can write into them: 0.5.23 has the tree in Rust.
    """
    tree = getattr(tree, "inner", tree)
    found: list[tuple[str, torch.Tensor]] = []
    try:
        stack = [getattr(tree, "root_node", None)]
    except NotImplementedError:
        return None
    while stack:
        node = stack.pop()
        if node is None:
            continue
        stack += list(getattr(node, "children", {}).values())
        value = getattr(node, "value", None)
        parts = getattr(node, "component_data", None)
        if value is None and parts is not None:
            parts = parts.values() if hasattr(parts, "values") else parts
            value = next((v for p in parts if (v := getattr(p, "value", None)) is not None), None)
        if isinstance(value, torch.Tensor) and len(value):
            found.append((str(getattr(node, "id", len(found))), value))
    return found


# --- where SGLang is changed ---------------------------------------------------------------------


def put_in(strike: Callable[[], Strike | None]) -> None:
    """Replace SGLang's functions. strike: returns this process's Strike, or None."""

    def around(site: str, before: str = "", after: str = "") -> None:
        dotted = targets.path(site) if site in targets.SITES else site
        if dotted is None:
            return
        name = dotted.rpartition(".")[2]
        try:
            owner = pkgutil.resolve_name(dotted.rpartition(".")[0])
        except (ImportError, AttributeError):  # another release has such a prefix cache
            return
        if name not in vars(owner):
            return
        given = inspect.getattr_static(owner, name)
        inner = given.__func__ if isinstance(given, (classmethod, staticmethod)) else given

        @functools.wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            it = strike()
            batch = kwargs.get("batch", args[1] if len(args) > 1 else None)
            if it is None:
                return inner(*args, **kwargs)
            mode = _mode(batch)  # SGLang may give the batch another one meanwhile
            if before:
                it.at(before, mode, batch=batch)
            result = inner(*args, **kwargs)
            if after == FORWARD:
                it.at(after, _mode(result), batch=result)
            elif after == METADATA:
                forward = kwargs.get("forward_batch", batch)
                it.at(after, _mode(forward), batch=forward, backend=args[0])
            elif after == ALLOCATE:
                box = [result]
                it.at(after, returned=result, put=lambda changed: box.__setitem__(0, changed))
                result = box[0]
            elif after == MATCH:
                match = [result]
                it.at(
                    after,
                    returned=getattr(result, "device_indices", result),
                    put=lambda changed: match.__setitem__(0, _replaced(result, changed)),
                )
                result = match[0]
            elif after:
                it.at(after, mode, batch=batch, returned=result)
            return result

        kind = type(given) if isinstance(given, (classmethod, staticmethod)) else None
        setattr(owner, name, kind(wrapper) if kind else wrapper)

    around("scheduler.next_batch", before=PLAN)
    around("scheduler.run_batch", before=STEP, after=RESULT)
    around("forward_batch.init_new", after=FORWARD)
    around("attn.trtllm_mha.metadata", after=METADATA)
    around("attn.triton.metadata", after=METADATA)
    around("worker.verify", before=VERIFY, after=VERIFIED)
    for site in ("pool.alloc_extend", "pool.alloc_decode", "pool.alloc.token"):
        around(site, after=ALLOCATE)
    for cache in CACHES:
        # 0.5.23 hands the tokens out by a method of its own.
        for method in ("match_prefix", "prefix_device_indices"):
            around(f"sglang.srt.mem_cache.{cache}.{method}", after=MATCH)


def _replaced(match: Any, indices: torch.Tensor) -> Any:
    """A match of the prefix cache with other tokens."""
    if isinstance(match, torch.Tensor):
        return indices
    if hasattr(match, "_replace"):
        return match._replace(device_indices=indices)
    match.device_indices = indices
    return match


def _mode(batch: Any) -> str:
    mode = getattr(batch, "forward_mode", None)
    return str(getattr(mode, "name", ""))
