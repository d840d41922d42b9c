"""Driven by test_prefix_cache_cases.py: one served load, and a fork for each way to break it.

SGLang's own requests, batches, allocators and prefix cache serve random requests without a model
(tests/versions/served.py). Then each fork breaks one thing, and serves on until something is told.
What SGLang's own check says of the idle server is written down, too.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "versions"))

import drive_ledger  # noqa: E402
import served  # noqa: E402
import torch  # noqa: E402

from g4debug.hooking import prefix_tree, req_kv  # noqa: E402
from g4debug.ledger import cache_tree  # noqa: E402

PAGE = served.PAGE


class Load:
    """A server, and the requests that come to it."""

    def __init__(self, books: drive_ledger.Books, server: served.Server, seed: int) -> None:
        self.books, self.server, self.rng = books, server, random.Random(seed)
        self.turn = 0
        self.census = False  # count all pages after each round

    def come(self, prompt: list[int], output: int, rid: str = "") -> str:
        rid = rid or f"r{self.turn}"
        self.server.come(rid, prompt, output)
        return rid

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.turn += 1
            if self.rng.random() < 0.4 and len(self.server.waiting) < 4:
                shared = [self.rng.randrange(3)] * self.rng.randint(16, 110)
                own = [self.rng.randint(10, 90) for _ in range(self.rng.randint(20, 70))]
                self.come(shared + own, self.rng.randint(1, 50))
            self.server.round(lambda: self.rng.randint(1, served.DRAFT))
            if self.census:
                self.books.census()

    def until(self, done: Callable[[], Any], most: int = 200) -> Any:
        """Go on until ``done()`` gives something."""
        for _ in range(most):
            found = done()
            if found:
                return found
            self.rounds(1)
        raise AssertionError(f"{done} did not come about")

    def drain(self) -> None:
        for _ in range(600):
            if self.server.round(lambda: 1) == "idle" and not self.server.waiting:
                return

    # --- whom to break ------------------------------------------------------------------------

    @property
    def tree(self) -> Any:
        return self.server.tree

    @property
    def table(self) -> torch.Tensor:
        return self.server.rows.req_to_token

    def running(self, pages: int) -> Any:
        """A request that decodes and has this many whole pages of its own."""
        batch = self.server.running
        for request in [] if batch is None else batch.reqs:
            if request.finished() or req_kv.row(request) < 0 or request.is_retracted:
                continue
            if request.retracted_stain:
                continue
            if len(self.own(request)) >= pages:
                return request
        return None

    def own(self, request: Any) -> list[int]:
        """The columns of the whole pages that are the request's own."""
        begin = int(req_kv.protected(request) or 0) // PAGE
        return list(range(begin, (req_kv.committed(request) - 1) // PAGE))

    def page_of(self, request: Any, column: int) -> int:
        return int(self.table[req_kv.row(request), column * PAGE]) // PAGE

    def put(self, request: Any, column: int, page: int) -> None:
        slots = torch.arange(page * PAGE, (page + 1) * PAGE)
        self.table[req_kv.row(request), column * PAGE : (column + 1) * PAGE] = slots.to(
            self.table.dtype
        )

    def nodes(self, pages: int, count: int) -> list[Any]:
        """Nodes of the tree that nobody has locked, of at least so many pages."""
        found = []
        for node in cache_tree.nodes(self.tree):
            value = prefix_tree.value_of(node)
            whole = value is not None and len(value) >= pages * PAGE
            alive = prefix_tree.swa_tokens_of(node) or not hasattr(
                self.server.allocator, "swa_attn_allocator"
            )
            if whole and alive:
                found.append(node)
        return found if len(found) >= count else []

    def ask_for(self, node: Any) -> None:
        """A request that begins as the path to this node does, and goes on."""
        tokens: list[int] = []
        while node.parent is not None:
            tokens = list(node.key.token_ids)[: len(node.key)] + tokens
            node = node.parent
        self.come([*tokens, *[95] * 40], 2, rid="asks")
        self.rounds(40)


Case = Callable[[Load], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def put_value(node: Any, value: torch.Tensor) -> None:
    data = getattr(node, "component_data", None)
    if data is None:
        node.value = value
    else:
        data[0].value = value


def value(node: Any) -> torch.Tensor:
    return prefix_tree.value_of(node)


# --- what the prefix cache holds (trees in Python) ----------------------------------------------


def broken_node(pages: int, change: Callable[[Load, Any, list[Any]], Any]) -> Case:
    def run(load: Load) -> None:
        nodes = load.until(lambda: load.nodes(pages, 2))
        node = nodes[-1]
        change(load, node, [n for n in nodes if n is not node])
        load.ask_for(node)

    return run


def alias(load: Load, node: Any, others: list[Any]) -> None:
    long = max(others, key=lambda n: len(value(n)))
    given = value(long)
    mine = value(node).clone()
    count = min(len(given), len(mine))
    mine[:count] = given[:count]
    put_value(node, mine)


def swap(load: Load, node: Any, others: list[Any]) -> None:
    other = others[0]
    count = min(len(value(node)), len(value(other)))
    mine, its = value(node).clone(), value(other).clone()
    mine[:count], its[:count] = value(other)[:count], value(node)[:count]
    put_value(node, mine)
    put_value(other, its)


def live_page(load: Load, node: Any, others: list[Any]) -> None:
    request = load.until(lambda: load.running(1))
    mine = value(node).clone()
    page = load.page_of(request, load.own(request)[0])
    mine[:PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
    put_value(node, mine)


def free_page(load: Load, node: Any, others: list[Any]) -> None:
    mine = value(node).clone()
    page = drive_ledger.free_pages(full_of(load))[-1]  # the one that is handed out last
    mine[:PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
    put_value(node, mine)


CASES |= {
    "node_alias": broken_node(1, alias),
    "node_swap": broken_node(1, swap),
    "node_shifted": broken_node(2, lambda _, n, o: put_value(n, value(n).roll(PAGE))),
    "node_slots_shifted": broken_node(2, lambda _, n, o: put_value(n, value(n) + 1)),
    "node_reversed": broken_node(
        2, lambda _, n, o: put_value(n, value(n).reshape(-1, PAGE).flip(0).flatten())
    ),
    "node_short": broken_node(2, lambda _, n, o: put_value(n, value(n)[:-PAGE].clone())),
    "node_live_page": broken_node(1, live_page),
    "node_free_page": broken_node(1, free_page),
    "node_zero_page": broken_node(
        1, lambda _, n, o: put_value(n, torch.cat([torch.arange(PAGE), value(n)[PAGE:]]))
    ),
}


# --- what a request hands over ------------------------------------------------------------------


def full_of(load: Load) -> Any:
    return load.server.allocator.full_attn_allocator


def broken_row(change: Callable[[Load, Any, list[int]], Any], pages: int = 2) -> Case:
    def run(load: Load) -> None:
        request = load.until(lambda: load.running(pages))
        change(load, request, load.own(request))
        rid = request.rid
        load.until(lambda: all(r.rid != rid for r in load.server.running.reqs))

    return run


def other_live(load: Load, request: Any, columns: list[int]) -> None:
    load.rounds(0)
    others = [r for r in load.server.running.reqs if r is not request and load.own(r)]
    if not others:
        load.come([94] * 60, 400, rid="other")
        others = load.until(
            lambda: [r for r in load.server.running.reqs if r is not request and load.own(r)]
        )
    load.put(request, columns[0], load.page_of(others[0], load.own(others[0])[0]))


def cached_page(load: Load, request: Any, columns: list[int]) -> None:
    row = load.table[req_kv.row(request)]
    mine = set((row // PAGE).tolist())
    slots = cache_tree.read(load.tree)
    pages = {int(s) // PAGE for s in drive_cached(slots)} - mine
    load.put(request, columns[0], min(pages))


def drive_cached(look: Any) -> list[int]:
    from g4debug.ledger.holders import finish

    return finish(look).full.tolist()


def swap_columns(load: Load, request: Any, columns: list[int]) -> None:
    one, two = (load.page_of(request, c) for c in columns[:2])
    load.put(request, columns[0], two)
    load.put(request, columns[1], one)


def shift_slots(load: Load, request: Any, columns: list[int]) -> None:
    begin = columns[0] * PAGE
    row = load.table[req_kv.row(request)]
    row[begin : begin + PAGE] = row[begin : begin + PAGE].roll(1)


CASES |= {
    "row_foreign": broken_row(other_live),
    "row_cached": broken_row(cached_page),
    "row_free": broken_row(
        lambda load, r, c: load.put(r, c[0], drive_ledger.free_pages(full_of(load))[-1])
    ),
    "row_twice": broken_row(lambda load, r, c: load.put(r, c[1], load.page_of(r, c[0]))),
    "row_swapped": broken_row(swap_columns),
    "row_slots": broken_row(shift_slots),
    "row_zero": broken_row(lambda load, r, c: load.put(r, c[0], 0)),
    "row_outside": broken_row(lambda load, r, c: load.put(r, c[0], 4711)),
}


# --- what the prefix cache has of a request that runs -------------------------------------------


def broken_lent(change: Callable[[Load, Any, int], Any], pages: int = 1) -> Case:
    """A request decodes whose first pages were lent to it; ``change`` is given the last of them."""

    def run(load: Load) -> None:
        prompt = [91] * (4 * PAGE + 3)
        load.come(prompt, 1, rid="first")
        load.until(lambda: all(r.rid != "first" for r in (*load.server.waiting, *alive(load))))
        load.come([*prompt, 90, 89], 300, rid="second")

        def lent() -> Any:
            for request in alive(load):
                cached = int(req_kv.protected(request) or 0) // PAGE
                if request.rid == "second" and cached >= pages:
                    return request, cached - 1
            return None

        request, column = load.until(lent)
        change(load, request, column)
        assert req_kv.row(request) > 0, "it still runs"
        load.rounds(2)

    return run


def alive(load: Load) -> list[Any]:
    """The requests that decode."""
    running = [] if load.server.running is None else load.server.running.reqs
    return [r for r in running if not r.finished() and req_kv.row(r) > 0]


def another_in_this_column(load: Load, request: Any, column: int) -> None:
    """A page that a live request has of its own, in the same column: only the tree tells."""
    load.come(list(range(1, (column + 1) * PAGE + 2)), 100, rid="same-column")
    (other,) = load.until(lambda: [r for r in alive(load) if r.rid == "same-column"])
    load.put(request, column, load.page_of(other, column))


def cached_in_this_column(load: Load, request: Any, column: int) -> None:
    """A page that the prefix cache has in the same column of another prompt."""
    mine = load.page_of(request, column)
    for node in cache_tree.nodes(load.tree):
        begin = sum(len(n.key) for n in above(node)) // PAGE
        has = value(node)
        if begin <= column < begin + len(has) // PAGE:
            page = int(has[(column - begin) * PAGE]) // PAGE
            if page != mine:
                load.put(request, column, page)
                return
    raise AssertionError("no other node reaches this column")


def above(node: Any) -> list[Any]:
    found = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


def one_slot(load: Load, request: Any, column: int) -> None:
    load.table[req_kv.row(request), column * PAGE + 5] += 1


def exchanged(load: Load, request: Any, column: int) -> None:
    one, two = load.page_of(request, column - 1), load.page_of(request, column)
    load.put(request, column - 1, two)
    load.put(request, column, one)


CASES |= {
    "lent_live": broken_lent(another_in_this_column),
    "lent_cached": broken_lent(cached_in_this_column),
    "lent_slot": broken_lent(one_slot),
    "lent_exchanged": broken_lent(exchanged, 2),
    "lent_free": broken_lent(
        lambda load, r, c: load.put(r, c, drive_ledger.free_pages(full_of(load))[-1])
    ),
}


@case
def chunk_not_admitted(load: Load) -> None:
    """Upstream #24252: the whole prompt is handed over, and only a part of it was computed."""
    load.come([93] * 300, 3, rid="long")
    server = load.server
    load.until(lambda: server.chunked is not None and server.chunked.rid == "long")
    request = server.chunked
    if hasattr(request, "fill_ids"):
        request.fill_ids = request.origin_input_ids + request.output_ids
    else:
        whole = request.origin_input_ids + request.output_ids
        request.full_untruncated_fill_ids = whole
        if hasattr(request, "set_extend_range"):  # 0.5.15
            request.set_extend_range(request.extend_range.start, len(whole))
        else:
            request.extend_end = len(whole)
    load.server._unfinished(request)


def broken_key(change: Callable[[Any], None]) -> Case:
    """The key of the next insert is changed on its way."""

    def run(load: Load) -> None:
        load.come([92] * (3 * PAGE), 3, rid="mine")
        tree, done = load.tree, []

        def insert(params: Any, *args: Any, **kwargs: Any) -> Any:
            if not done:
                done.append(params)
                params.key = copy.copy(params.key)
                change(params.key)
            return type(tree).insert(tree, params, *args, **kwargs)

        tree.insert = insert
        load.until(lambda: done)

    return run


def other_token(key: Any) -> None:
    key.token_ids = key.token_ids[:]
    key.token_ids[1] += 1


def other_namespace(key: Any) -> None:
    key.extra_key = "another"


CASES |= {
    "key_other_token": broken_key(other_token),
    "key_other_namespace": broken_key(other_namespace),
}


@case
def committed_too_long(load: Load) -> None:
    """More pages than the request holds: a length that counts two pages too much."""
    request = load.until(lambda: load.running(1))
    kv = served.kv_of(request)
    kv.kv_committed_len = kv.kv_allocated_len + 2 * PAGE
    request.output_ids.extend([7] * (2 * PAGE))
    served.release(request, load.tree)


def protects(name: str, count: Callable[[int], int]) -> None:
    """A case in which ``cache_protected_len`` is another number when the request ends."""

    def run(load: Load) -> None:
        request = load.until(lambda: load.running(1))
        holder = req_kv.holder(request, "cache_protected_len")
        holder.cache_protected_len = count(holder.cache_protected_len)
        served.release(request, load.tree)

    CASES[name] = run


protects("protected_negative", lambda n: -1)
protects("protected_far", lambda n: 1 << 20)
protects("protected_zero", lambda n: 0 if n else PAGE)
protects("protected_more", lambda n: n + PAGE)
protects("protected_one_more", lambda n: n + 1)


# --- pages that are lost ------------------------------------------------------------------------


def lost(function: Case) -> Case:
    def run(load: Load) -> None:
        load.census = True
        function(load)
        load.rounds(6)

    CASES[function.__name__] = run
    return run


@lost
def lost_full_page(load: Load) -> None:
    take_free(full_of(load))


@lost
def lost_swa_page(load: Load) -> None:
    take_free(load.server.allocator.swa_attn_allocator)


def take_free(allocator: Any) -> None:
    if len(allocator.free_pages):
        allocator.free_pages = allocator.free_pages[1:]
    else:
        allocator.release_pages = allocator.release_pages[1:]


@lost
def lost_protected(load: Load) -> None:
    """A page of its own is taken for one of the prefix cache."""
    request = load.until(lambda: load.running(1))
    holder = req_kv.holder(request, "cache_protected_len")
    holder.cache_protected_len += PAGE


@lost
def lost_evicted(load: Load) -> None:
    """SWA pages are taken for evicted: the node that comes of them is a tombstone."""
    request = load.until(lambda: load.running(2))
    evicted = req_kv.evicted(request)
    begin = max(evicted, int(req_kv.protected(request) or 0))
    kv = served.kv_of(request)
    if hasattr(kv, "set_evicted_seqlen"):
        swa = next(c for c in load.tree.tree_components if str(c) == "swa")
        kv.set_evicted_seqlen(swa, begin + PAGE)
    else:
        holder = req_kv.holder(request, "swa_evicted_seqlen")
        holder.swa_evicted_seqlen = begin + PAGE


@lost
def lost_free(load: Load) -> None:
    """A request ends, and its pages stay behind."""
    request = load.until(lambda: load.running(2))
    kv = served.kv_of(request)
    kv.kv_allocated_len = int(req_kv.protected(request) or 0) + PAGE
    kv.kv_committed_len = min(kv.kv_committed_len, kv.kv_allocated_len)


@lost
def lost_short_node(load: Load) -> None:
    node = load.until(lambda: load.nodes(2, 1))[0]
    put_value(node, value(node)[:-PAGE].clone())


@lost
def lost_alias(load: Load) -> None:
    nodes = load.until(lambda: load.nodes(1, 2))
    alias(load, nodes[0], nodes[1:])


@lost
def lost_tombstone(load: Load) -> None:
    """A node is made a tombstone, and its SWA pages are not freed."""
    node = load.until(lambda: load.nodes(1, 1))[0]
    data = getattr(node, "component_data", None)
    count = prefix_tree.swa_tokens_of(node)
    if data is not None:
        data[1].value = None
        core = load.tree.tree_core if hasattr(load.tree, "tree_core") else load.tree
        sizes = (
            core.component_protected_size_ if data[1].lock_ref else core.component_evictable_size_
        )
        sizes[next(c for c in sizes if str(c) == "swa")] -= count
        return
    node.swa_tombstone = True
    if node.swa_lock_ref:
        load.tree.swa_protected_size_ -= count
    else:
        load.tree.swa_evictable_size_ -= count


@case
def lock_kept(load: Load) -> None:
    """A lock is taken, and never given back."""
    load.drain()
    tree = load.tree
    from g4debug.hooking import targets

    params = served.first("sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams")
    key = served.first("sglang.srt.mem_cache.radix_cache.RadixKey")
    ids = [92] * 80
    load.come(ids, 4, rid="locked")
    load.drain()
    given = served.array("q", ids) if served._arrays() else ids
    found = tree.match_prefix(params(key=key(given)))
    assert targets.sglang_version() is not None
    tree.inc_lock_ref(found.last_device_node)


@case
def row_kept(load: Load) -> None:
    load.drain()
    slots = load.server.rows.free_slots
    slots.pop()


@case
def row_free_twice(load: Load) -> None:
    load.drain()
    slots = load.server.rows.free_slots
    slots.append(slots[0])


@case
def row_free_while_it_runs(load: Load) -> None:
    request = load.until(lambda: load.running(1))
    load.server.rows.free_slots.append(req_kv.row(request))
    load.books.census()


@case
def size_drifts(load: Load) -> None:
    """What the tree says of itself is a page too much (trees in Python)."""
    load.drain()
    core = load.tree.tree_core if hasattr(load.tree, "tree_core") else load.tree
    if hasattr(core, "component_evictable_size_"):
        core.component_evictable_size_[next(iter(core.component_evictable_size_))] += PAGE
    else:
        core.full_evictable_size_ += PAGE


@case
def nothing(load: Load) -> None:
    load.rounds(60)


# --- what comes of it ---------------------------------------------------------------------------


def sglangs(load: Load) -> list[str]:
    """What SGLang's own check of an idle server would say."""
    server, tree = load.server, load.tree
    allocator = server.allocator
    found = []
    for pool, total, free in (
        ("full", served.FULL, allocator.full_available_size()),
        ("swa", served.SWA, allocator.swa_available_size()),
    ):
        has = getattr(tree, f"{pool}_evictable_size")(), getattr(tree, f"{pool}_protected_size")()
        if free + sum(has) != total:
            found.append(pool)
        if has[1]:
            found.append(f"{pool} locked")
    if len(server.rows.free_slots) != served.ROWS:
        found.append("rows")
    return found


def outcome(load: Load, run: Case) -> dict[str, Any]:
    from g4debug.trapping.trap import TrapError

    said: dict[str, Any] = {}
    try:
        run(load)
        said["after"] = "broken"
        load.drain()
        said["sglang"] = sglangs(load)
        load.books.scheduler.running_batch = load.books.scheduler.last_batch = None
        load.books.leak.check(load.books.scheduler, idle=True)
        said["after"] = "idle"
    except TrapError as e:
        f = e.finding
        said |= {
            "check": f.check, "kind": f.kind, "headline": f.headline, "got": f.got,
            "cause": f.cause, "owner": f.owner,
        }  # fmt: skip
    except Exception:
        said["died"] = traceback.format_exc()[-1500:]
    if load.books.ledger.broken:
        said["broken"] = load.books.ledger.broken
    return said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--core", default="")
    parser.add_argument("--spec", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", default="")
    args = parser.parse_args()
    served.without_kernels()
    served.fast_kernels()
    late = random.Random(args.seed) if args.late else None
    books = drive_ledger.Books(Path(tempfile.mkdtemp(prefix="g4debug-cases-")), late, "")
    books.fault = "the cases'"  # so that it does not compare its books itself
    server = served.Server(args.spec, True, args.overlap, args.core or None)
    books.serve(server)
    load = Load(books, server, args.seed)
    load.rounds(60)
    found: dict[str, Any] = {"checked": {}}
    for name, tally in books.cache.context.status.tallies.items():
        found["checked"][name] = tally.count
    found["native"] = prefix_tree.is_native(server.tree)
    chosen = args.cases.split(",") if args.cases else list(CASES)
    for name in chosen:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                text = json.dumps(outcome(load, CASES[name]))
            except BaseException as e:
                text = json.dumps({"died": repr(e)})
            with os.fdopen(write, "w") as out:
                out.write(text)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as told:
            found[name] = json.loads(told.read() or "{}")
        os.waitpid(pid, 0)
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
