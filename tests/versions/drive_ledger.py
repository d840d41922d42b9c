"""Driven by test_ledger_of_release.py in a process of its own, with a release first on its path.

Requests come, go on, end, are retracted and aborted at random, through the release's own code, and
our ledger looks on. After each call of an allocator what the ledger believes is held against the
allocator's own free lists and mapping; in between, a census is taken.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import random
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import served

CENSUS = 7  # rounds between two censuses
DISTINCT = 3  # beginnings that prompts share
DRIVEN = ("sglang.srt.mem_cache", "sglang.srt.managers.schedule_batch")  # what is driven here


class Arrival:
    """Stands for torch.cuda.Event: a copy arrives at some time, or when it is waited for."""

    def __init__(self, late: random.Random) -> None:
        self.late, self.here = late, False

    def query(self) -> bool:
        self.here = self.here or self.late.random() < 0.3
        return self.here

    def synchronize(self) -> None:
        self.here = True


class Books:
    """The ledger, and the tracers that rest on it, in ``raise`` mode."""

    def __init__(self, folder: Path, late: random.Random | None, fault: str) -> None:
        """late: draws when indices reach the host, as they do on a GPU. None: at once."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        from g4debug.faults import base as faults
        from g4debug.faults.grammar import parse
        from g4debug.findings.steps import Recorder
        from g4debug.fixes import base as fixes
        from g4debug.hooking import targets
        from g4debug.hooking.hooks import Hooks
        from g4debug.ledger.hooks import LedgerHooks
        from g4debug.ledger.ledger import Ledger
        from g4debug.settings import Settings
        from g4debug.tracers.base import Context
        from g4debug.tracers.kv_allocator.tracer import KvAllocatorTracer
        from g4debug.tracers.pool_leak.tracer import PoolLeakTracer
        from g4debug.tracers.prefix_cache.tracer import PrefixCacheTracer
        from g4debug.trapping.describe import Describer
        from g4debug.trapping.trap import Trap

        hooks, self.recorder = Hooks(), Recorder(16)
        self.fired: tuple[int, str] | None = None  # the step of the fault, and what it did
        settings = Settings(debug=True, debug_dir=folder)
        self.ledger = Ledger(self.recorder)
        self.hooks = LedgerHooks(self.ledger)
        self.hooks.install(hooks)
        trap = Trap(settings, Describer(self.recorder))

        def context(name: str) -> Context:
            return Context(name, hooks, settings, self.recorder, trap, self.ledger)

        self.swa = KvAllocatorTracer(context("kv-allocator"))
        self.leak = PoolLeakTracer(context("pool-leak"))
        self.cache = PrefixCacheTracer(context("prefix-cache"))
        self.swa.install()
        self.cache.install()
        self.leak.install()
        for injection in faults.install_all(parse(fault), hooks):
            log = injection.log

            def fired(what: str, log: Any = log) -> None:
                self.fired = self.fired or (self.recorder.event_step, what)
                log(what)

            injection.log = fired  # type: ignore[method-assign]
        fixes.apply_all(hooks, {}, {})  # what this release has wrong is not what we look for
        for site in hooks.sites:  # there is no scheduler and no model here, and they take long
            if not str(targets.path(site)).startswith(DRIVEN):
                hooks._entries.pop(site)
        hooks.install()
        HookRegistry.apply_hooks()
        self.late, self.fault = late, fault
        if late is not None:
            self.ledger.is_far = lambda indices: True  # type: ignore[method-assign]
            self.ledger.transport._event = lambda: Arrival(late)  # type: ignore[method-assign]
            self.ledger.transport._beside = lambda ready: nullcontext()  # type: ignore[method-assign]
        self.server: served.Server | None = None
        self.calls: collections.Counter[str] = collections.Counter()
        self._watch()

    def _watch(self) -> None:
        """Compare after each call of a public method of an allocator, also of one unknown to us."""
        from g4debug.hooking import targets

        deep = 0

        def watched(name: str, method: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal deep
                deep += 1
                try:
                    result = method(*args, **kwargs)
                finally:
                    deep -= 1
                if deep == 0 and self.server is not None and not (self.late or self.fault):
                    self.calls[name] += 1
                    self.compare(name)
                return result

            return call

        for site in ("swa.init", "pool.init"):
            owner = str(targets.path(site)).rpartition(".")[0]
            allocator = served.first(owner)
            for kind in reversed(allocator.__mro__[:-1]):
                for name, method in list(vars(kind).items()):
                    changes = name.startswith(("alloc", "free", "set_", "clear", "restore"))
                    if changes and inspect.isfunction(method):
                        setattr(kind, name, watched(name, method))

    def serve(self, server: served.Server) -> None:
        """Look at this server from now on."""
        self.server = server
        self.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=server.allocator,
            req_to_token_pool=server.rows,
            tree_cache=server.tree,
            server_args=SimpleNamespace(speculative_eagle_topk=1),
            running_batch=None,
            last_batch=None,
        )
        assert self.ledger.holders is not None
        self.ledger.holders.scheduler = self.scheduler
        self.ledger.owners.prepare(served.ROWS + 1)
        self.leak._usable = None
        server.before_run = self.before_run  # type: ignore[method-assign]
        server.before_result = self.before_result  # type: ignore[method-assign]

    def before_run(self, batch: Any) -> None:
        self.recorder.count()
        self.swa.before_run_batch(self.scheduler, batch)
        self.hooks.before_run(self.scheduler, batch)
        self.cache.before_run(self.scheduler, batch)
        # The forward, of a server that overlaps and of one that does not.
        self.hooks.before_forward()
        self.hooks.meanwhile()
        if self.late is not None:
            self.ledger.transport.gathers = self.late.random() < 0.5

    def before_result(self) -> None:
        self.hooks.before_result()
        self.cache.before_result()
        self.cache.judge_rows(self.scheduler)

    # --- what must hold -----------------------------------------------------------------------

    def compare(self, after: str) -> None:
        """The ledger's held pages, their partners and its shadow are the allocator's own."""
        from g4debug.ledger.shadow import FREE

        ledger, allocator = self.ledger, self.server.allocator
        ledger.settle(wait=True)
        assert not ledger.broken, f"after {after}: {ledger.broken}"
        for name, pool in ledger.pools.items():
            inner = getattr(allocator, f"{name}_attn_allocator")
            free = free_pages(inner)
            assert len(set(free)) == len(free), f"after {after}: {name} has pages twice"
            held = set(range(1, pool.pages)) - set(free)
            ours = set(pool.held.nonzero()[0].tolist())
            assert ours == held, (
                f"after {after}: the ledger's {name} pages differ: it has "
                f"{sorted(ours - held)} too many, and {sorted(held - ours)} too few"
            )
        full = ledger.pools["full"]
        mapped = (allocator.full_to_swa_index_mapping[:-1] // full.page_size).tolist()
        mapped = mapped[:: full.page_size]
        words = ledger.shadow.tolist()
        for page in full.held.nonzero()[0].tolist():
            known, swa = int(full.partner[page]), mapped[page]
            # While a SWA page goes over to another full page, the mapping has it twice.
            went = known == 0 and ledger.pools["swa"].partner[swa] not in (0, page)
            assert went or known in (swa, -1), (
                f"after {after}: full page {page} has SWA page {mapped[page]}, ledger: {known}"
            )
            assert words[page] == mapped[page], f"after {after}: shadow of page {page}"
        wrong = [p for p in range(1, full.pages) if (words[p] == FREE) == bool(full.held[p])]
        assert not wrong, f"after {after}: the shadow differs about pages {wrong}"

    def owners(self) -> None:
        """A page beyond a request's cached prefix belongs to that request."""
        full = self.ledger.pools["full"]
        batches = [b for b in (self.server.running, self.server.last) if b is not None]
        for request in {id(r): r for b in batches for r in b.reqs}.values():
            kv = served.kv_of(request)
            row = kv.req_pool_idx if kv is not request else request.req_pool_idx
            if row is None:
                continue
            holder = kv if hasattr(kv, "cache_protected_len") else request
            begin = -(-int(holder.cache_protected_len) // served.PAGE)
            length = served.allocated(request)
            tokens = self.server.rows.req_to_token[row, : length : served.PAGE].tolist()
            for page in [t // served.PAGE for t in tokens][begin:]:
                owner = full.owner[page]
                assert owner == request.rid, f"page {page} is {request.rid}'s, ledger: {owner!r}"

    def census(self) -> None:
        self.scheduler.running_batch = self.server.running
        self.scheduler.last_batch = self.server.last
        self.leak.check(self.scheduler)
        assert self.leak._usable, "pool-leak does not judge this server"


def free_pages(inner: Any) -> list[int]:
    """All pages in the free lists of one pool, by the release's own attributes."""
    import torch

    staged = getattr(inner, "staged_pages", None) or []
    lists = [inner.free_pages, getattr(inner, "release_pages", None), *staged]
    found: list[int] = torch.cat([pages for pages in lists if pages is not None]).tolist()
    return found


def run(books: Books, spec: bool, radix: bool, overlap: bool, core: str, rounds: int, seed: int):
    """Serve ``rounds`` rounds of one kind of server."""
    books.server = None
    books.ledger.settle(wait=True)
    server = served.Server(spec, radix, overlap, core or None)
    books.serve(server)
    rng = random.Random(seed)
    seen: collections.Counter[str] = collections.Counter()
    for turn in range(rounds):
        if rng.random() < 0.3 and len(server.waiting) < 6:
            shared = [rng.randrange(DISTINCT)] * rng.randint(1, 150)
            own = [rng.randint(10, 90) for _ in range(rng.randint(1, 60))]
            server.come(f"r{turn}", shared + own, rng.randint(1, 80))
        if rng.random() < 0.05 and server.running is not None and server.running.reqs:
            server.aborted.add(rng.choice(server.running.reqs).rid)
        seen[server.round(lambda: rng.randint(1, served.DRAFT))] += 1
        if (books.late is None or turn % CENSUS == 0) and not books.fault:
            books.compare("a round")
            books.owners()
        if turn % CENSUS == 0:
            books.census()
    for _ in range(rounds):
        if server.round(lambda: 1) == "idle" and not server.waiting:
            break
    books.leak.check(books.scheduler, idle=True)
    if hasattr(server.tree, "evict") and radix:
        params = served.first("sglang.srt.mem_cache.base_prefix_cache.EvictParams")
        server.tree.evict(params(num_tokens=served.FULL, swa_num_tokens=served.SWA))
        books.leak.check(books.scheduler, idle=True)
    books.compare("the end")
    held = int(books.ledger.pools["full"].held.sum())
    assert held == 0, f"{held} pages are held by an empty server"
    return {**seen, "served": server.served, "retracted": server.retracted}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", default="", help="as G4DEBUG_FAULTS; it must be found")
    parser.add_argument("--late", action="store_true", help="as on a GPU")
    parser.add_argument("--kinds", default="plain,plain-off", help="plain|spec[-off][-sync][-core]")
    args = parser.parse_args()
    begin = time.monotonic()
    served.without_kernels()
    served.fast_kernels()
    from g4debug.hooking import targets
    from g4debug.trapping.trap import TrapError

    with tempfile.TemporaryDirectory() as folder:
        books = Books(Path(folder), random.Random(args.seed) if args.late else None, args.fault)
        found = {}
        for kind in args.kinds.split(","):
            parts = kind.split("-")
            core = next((p for p in parts if p in ("python", "rust")), "")
            try:
                found[kind] = run(
                    books, parts[0] == "spec", "off" not in parts, "sync" not in parts, core,
                    args.rounds, args.seed,
                )  # fmt: skip
            except TrapError as e:
                if not args.fault:
                    raise
                where = e.finding.location.step
                found[kind] = {"kind": e.finding.kind, "step": where, "fired": books.fired}
                break
    result = {
        "release": str(targets.sglang_version()),
        "kinds": found,
        "calls": books.calls,
        "seconds": round(time.monotonic() - begin, 1),
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
