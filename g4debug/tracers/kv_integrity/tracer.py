"""kv-integrity: nobody writes into a freed KV page, and the KV of a complete page does not change.

The tracer is opt-in (``G4DEBUG_TRACE=kv-integrity``), because it reads and writes KV memory:

* When a page is freed, it gets a stamp. When the page is handed out again, and whenever the server
  is idle, the stamp must still be there. If it is not, somebody wrote into the page through a stale
  table. From then on, whoever still *reads* the page gets the stamp, not old values that happen to
  be right.
* When all tokens of a page are committed, the page is sealed: it is searched for NaN and Inf, and
  its checksum is kept on the device. The checksum is compared when the page is freed, when the
  server is idle, and in between in turns: SAMPLE tokens of each pool after each step.

Each check is queued on the stream of the forwards, behind what it looks at and before what may
change it; :mod:`g4debug.tracers.kv_integrity.lane` does that, with overlap scheduling, too. The
results come to the host without a step that waits for them. All this is sound only if nobody else
moves KV. If somebody does, ``limits`` says who, and the tracer checks nothing.

A draft with KV of its own writes it into the pages of the same number in a pool of its own. That
is watched in the same way: what is committed in the one is in the other.

SGLang sometimes processes a result between the preparation of a batch and its launch (a grammar
with speculative decoding, for instance). A request that ended in that result is launched once more,
after its pages were freed, and a token is written into one of them. What it computes is thrown
away. So after such a launch, the pages that were freed since the launch before get their stamps
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch

from g4debug import speculation
from g4debug.findings.record import Evidence, Finding, PageEvent
from g4debug.hooking import req_kv, targets
from g4debug.hooking.arguments import argument
from g4debug.hooking.free_group import in_free_group
from g4debug.hooking.idle_work import IdleWork
from g4debug.hooking.layer_pools import attention_pool
from g4debug.hooking.resolved import server_argument
from g4debug.ledger.alloc_hooks import plan
from g4debug.ledger.books import Pages, PoolLedger
from g4debug.sanitizer.unsupported import moving_pages, takes_snapshots
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.kv_integrity import report
from g4debug.tracers.kv_integrity.kv_pages import KvPages, Unsupported
from g4debug.tracers.kv_integrity.lane import Lane
from g4debug.tracers.kv_integrity.watched import Look, Watched, layers_of, to_device

HANDED_OUT = 16_384  # tokens of new pages whose stamps are compared at a time
SAMPLE = 4096  # tokens of sealed pages that are compared in each pool after each step
DRAFT = "draft"
KNOWN = 4096  # requests whose committed length is remembered


class KvIntegrityTracer:
    def __init__(self, context: Context) -> None:
        assert context.ledger is not None, "declared as ledger=True"
        self.context, self.ledger = context, context.ledger
        self.pools: dict[str, Watched] = {}
        self.limits: list[str] = []  # why nothing can be checked here
        # By id() of the allocator of one pool: the names of what is watched of its pages.
        self._names: dict[int, tuple[str, ...]] = {}
        self._committed: dict[str, int] = {}  # rid -> tokens whose KV will not be written again
        self.idle = IdleWork(self.check_all)
        self.lane = Lane(self.ledger)
        self._arrived = context.isolate(lambda enter, words: enter(words))

    def install(self) -> None:
        context = self.context
        self.ledger.listen(context.isolate(self.listen))
        for size in ("", ".token"):  # page size 1 has an allocator of its own
            context.after(f"pool.init{size}", self.after_pool_init)
            context.after(f"pool.alloc{size}", self.after_alloc)
        # Where all frees end in one place, that place.
        if targets.frees_in_one_place():
            context.after("pool.release", self.after_release)
        else:
            context.after("pool.free", self.after_free)
        context.after("pool.free.token", self.after_free)
        context.after("swa.init", self.after_swa_init)
        context.after("scheduler.init", self.after_scheduler_init)
        context.after("pool.alloc_extend", self.after_extend)
        context.after("pool.alloc_decode", self.after_decode)
        context.after("scheduler.run_batch", self.after_run_batch)
        context.before("scheduler.process_result", self.before_result)
        context.after("scheduler.process_result", self.after_result)
        context.before("scheduler.on_idle", self.before_idle)

    # --- which pools -----------------------------------------------------------------------

    def after_pool_init(self, result: Any, allocator: Any, *args: Any, **kwargs: Any) -> Any:
        # If this is an inner allocator of a SWA allocator, after_swa_init corrects it.
        if not self.pools and not self.limits:
            self.watch(allocator, "full", allocator.get_kvcache())
        return result

    def after_swa_init(self, result: Any, allocator: Any, *args: Any, **kwargs: Any) -> Any:
        self.pools.clear()
        self._names.clear()
        self.limits.clear()
        for name in ("full", "swa"):
            self.watch(getattr(allocator, f"{name}_attn_allocator"), name, allocator.get_kvcache())
        return result

    def watch(self, allocator: Any, name: str, kvcache: Any) -> None:
        """Watch the pool of ``allocator``. ``kvcache``: the model's KV cache, for its layers."""
        pool = self.ledger.pools.get(name)
        if pool is None:
            return
        try:
            kv = KvPages(attention_pool(allocator.get_kvcache()), pool.pages, pool.page_size)
        except Unsupported as e:
            self.limits.append(str(e))
            return
        self.pools[name] = Watched(pool, kv, layers_of(kvcache, name))
        # A page is stamped before it can be handed out again.
        self.ledger.judges_first.add(self.context.tracer_id)
        self._names[id(allocator)] = (name,)

    def watch_draft(self, scheduler: Any) -> None:
        """Watch the KV of a draft that writes its own, in the pages that the target's has, too."""
        algorithm = getattr(scheduler, "spec_algorithm", None)
        worker, full = speculation.of(scheduler), self.pools.get("full")
        if full is None or algorithm is None or algorithm.is_none():
            return
        if worker is not None and not worker.draft_writes_kv:
            return
        settings, parts = self.context.settings, speculation.draft_parts(scheduler)
        why = ""
        if worker is None or not parts:
            why = "what it writes there, and when, is not known of this worker"
        elif not worker.is_judged(settings, settings.cpu or not torch.cuda.is_available()):
            why = f"{worker.name} was never run with this tracer here"
        else:
            try:
                for part in parts:
                    self._watch_part(part, several=len(parts) > 1)
            except Unsupported as e:
                why = str(e)
        if why:
            self.context.limit("a draft's own KV is not watched", why)

    def _watch_part(self, part: speculation.DraftPool, several: bool) -> None:
        """Watch a pool of a draft. Raises Unsupported.

        several: the draft has models of one layer, which are numbered as that layer.
        """
        pool = self.pools[part.pages].pool
        name = f"{DRAFT} {part.model}" if several else DRAFT
        layers = [part.model] if several else layers_of(part.whole, part.pages)
        kv = KvPages(part.pool, pool.pages, pool.page_size)
        self.pools[name] = Watched(pool, kv, layers, DRAFT)
        for allocator, names in self._names.items():
            if part.pages in names:
                self._names[allocator] = (*names, name)

    def after_scheduler_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self.limits += limits(scheduler.server_args)
        if getattr(scheduler, "enable_overlap", False):
            on_gpu = any(watched.kv.device.type == "cuda" for watched in self.pools.values())
            self.lane.follow(scheduler.forward_stream if on_gpu else None)
        if not self.pools and not self.limits:
            self.limits.append("the server has no paged KV pool")
        if not self.limits:
            self.watch_draft(scheduler)
        else:
            self.pools.clear()
            self._names.clear()
            self.ledger.judges_first.discard(self.context.tracer_id)
            self.context.off(f"it can check nothing on this server: {'; '.join(self.limits)}")
        return result

    # --- pages that come and go --------------------------------------------------------------

    def listen(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> None:
        for watched in self.pools.values():
            if watched.pool is not pool:
                continue
            watched.enter(event, pages)
            if event.kind == "clear":
                self.lane.queue(watched.kv.forget)
                self.lane.settle(wait=True)  # the memory may be given back next

    def after_free(self, result: Any, allocator: Any, free_index: torch.Tensor) -> Any:
        if not in_free_group(allocator):
            self._gone(self._of(allocator))
        return result

    def after_release(self, result: Any, allocator: Any, *page_ids: torch.Tensor) -> Any:
        self._gone(self._of(allocator))
        return result

    def _gone(self, every: Sequence[Watched]) -> None:
        """Pages were put into the free list: compare the sealed ones, and stamp all."""
        for watched in every:
            self._leave(watched)

    def _leave(self, watched: Watched) -> None:
        gone, sealed = watched.gone()
        if not len(gone):
            return
        parts = list(watched.chunks(sealed))

        def work() -> torch.Tensor | None:
            codes = [watched.kv.changed(watched.on_device(part)) for part in parts]
            watched.kv.stamp(watched.on_device(gone))
            return torch.cat(codes, dim=1) if codes else None

        self._queue(work, self._comparing(watched, sealed))

    def after_extend(self, out: Any, allocator: Any, *args: Any, **kwargs: Any) -> Any:
        """``alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, ...)``."""
        prefix = argument(args, kwargs, 1, "prefix_lens_cpu").tolist()
        self._grown(out, allocator, prefix, argument(args, kwargs, 3, "seq_lens_cpu"))
        return out

    def after_decode(self, out: Any, allocator: Any, *args: Any, **kwargs: Any) -> Any:
        """``alloc_decode(seq_lens, seq_lens_cpu, last_loc)``."""
        lengths = argument(args, kwargs, 1, "seq_lens_cpu")
        self._grown(out, allocator, [n - 1 for n in lengths.tolist()], lengths)
        return out

    def _grown(self, out: Any, allocator: Any, begins: list[int], lengths: torch.Tensor) -> None:
        every = self._of(allocator)
        for watched in every if out is not None else ():
            new = plan(begins, lengths.tolist(), watched.pool.page_size, lengths).new
            if new:
                self._handed_out(watched, out[to_device(np.array(new), out.device)])

    def after_alloc(self, out: Any, allocator: Any, need_size: int) -> Any:
        every = self._of(allocator)
        for watched in every if out is not None else ():
            self._handed_out(watched, out[:: watched.pool.page_size])
        return out

    def _handed_out(self, watched: Watched, first: torch.Tensor) -> None:
        """Compare the stamps of pages that are handed out. ``first``: their first tokens."""
        pages = first.to(torch.int64) // watched.pool.page_size
        # A broken allocator may hand out a number that is no page. Page 0 then has no stamp.
        pages = torch.where((pages > 0) & (pages < watched.pool.pages), pages, 0)
        # Where pages are now is known when the ledger knows it, not when the forward has run.
        watched.hand_outs += 1
        number = watched.hand_outs
        self.ledger.post(
            pages, lambda found: self._arrived(lambda p: watched.handed_out(p, number), found)
        )
        step, count = self.context.recorder.event_step, watched.pages_of(HANDED_OUT)
        for begin in range(0, len(pages), count):
            self._come(watched, pages[begin : begin + count], step)

    def _come(self, watched: Watched, pages: torch.Tensor, step: int) -> None:
        def work() -> torch.Tensor:
            codes = watched.kv.written(pages)
            watched.kv.unstamp(pages)
            return torch.cat((codes, pages[None]))

        self._written_in(watched, work, len(pages), step, idle=False, reads=(pages,))

    # --- pages that are there -----------------------------------------------------------------

    def after_run_batch(
        self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.pools and not self.ledger.broken:
            self.ledger.settle()
            self.lane.settle()
            self._commit(self._launched(batch))
            self.check_step()
            self.context.checked(1, "steps")
        return result

    def _launched(self, batch: Any) -> Sequence[Any]:
        """Note a launch. Returns the requests of the batch that still have a row.

        Without overlap scheduling all of them have.
        """
        requests: Sequence[Any] = batch.reqs
        fresh = [(watched, watched.launched()) for watched in self.pools.values()]
        if not self.lane.overlaps:
            return requests
        self.lane.last_forward = getattr(batch, "forward_iter", None) or self.lane.last_forward
        rows = req_kv.column(requests, req_kv.ROW)
        if min(rows, default=0) >= 0:
            return requests
        for watched, pages in fresh:
            if len(pages):
                self._again(watched, pages)
        return [r for r, row in zip(requests, rows, strict=True) if row >= 0]

    def _again(self, watched: Watched, pages: Pages) -> None:
        self._queue(lambda: watched.kv.stamp_again(watched.on_device(pages)))

    def before_result(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Whatever lies behind this batch's forward is found before its tokens are sent."""
        self.lane.settle(forward=getattr(batch, "forward_iter", None))

    def after_result(
        self, returned: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """With overlap scheduling the host learns only now which tokens a verify has accepted.

        Without speculation a token counts as soon as its batch is prepared, which may not be
        launched yet.
        """
        if not (self.lane.overlaps and self.pools) or self.ledger.broken or not _verified(batch):
            return returned
        self.ledger.settle()
        rows = req_kv.column(batch.reqs, req_kv.ROW)
        self._commit([r for r, row in zip(batch.reqs, rows, strict=True) if row >= 0])
        self.seal_completed()
        return returned

    def _commit(self, requests: Sequence[Any]) -> None:
        """Remember up to where the KV of these requests will not be written again."""
        for request in requests:
            # A session, and a group of beams, may go back and write its last tokens anew.
            if not getattr(request, "session", None) and not getattr(request, "beam_group", None):
                self._committed[str(request.rid)] = req_kv.committed(request)

    def seal_completed(self) -> None:
        for watched in self.pools.values():
            for part in watched.chunks(watched.completed(self._committed)):
                self._seal(watched, part)

    def check_step(self) -> None:
        """Seal the pages that the step completed, and compare the next ones in turn."""
        self.seal_completed()
        for watched in self.pools.values():
            for part in watched.chunks(watched.sample(watched.pages_of(SAMPLE))):
                self._compare(watched, part)
        if len(self._committed) > KNOWN:
            filling = {rid for w in self.pools.values() for rid in w.filling.values()}
            self._committed = {r: n for r, n in self._committed.items() if r in filling}

    def before_idle(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        # on_idle is called again and again while there is nothing to do.
        state = (self.context.recorder.step, self.ledger.serial)
        if state != self.idle.done and self.pools and scheduler.is_fully_idle():
            self.idle.go_on(state)

    def check_all(self) -> Generator[None, None, None]:
        """Compare all stamps and checksums, CHUNK pages at a time. For an idle server."""
        if self.ledger.broken:
            return
        self.ledger.settle(wait=True)
        for watched in self.pools.values():
            for part in watched.chunks(watched.stamped.nonzero()[0]):
                self._look(watched, part)
                self._settle_all()
                yield
            for part in watched.chunks(watched.sealed.nonzero()[0]):
                self._compare(watched, part)
                self._settle_all()
                yield

    def _settle_all(self) -> None:
        self.ledger.settle(wait=True)
        self.lane.settle(wait=True)

    def _look(self, watched: Watched, pages: Pages) -> None:
        """Look at the stamps of free pages."""

        def work() -> torch.Tensor:
            indices = watched.on_device(pages)
            return torch.cat((watched.kv.written(indices), indices[None]))

        self._written_in(watched, work, len(pages), self.context.recorder.step, idle=True)

    def _seal(self, watched: Watched, pages: Pages) -> None:
        step = self.context.recorder.step
        watched.sealed_at[pages] = watched.checked_at[pages] = step
        look = watched.look(pages, step)

        def work() -> torch.Tensor | None:
            indices = watched.on_device(pages)
            watched.kv.seal(indices)
            return watched.kv.not_finite(indices) if watched.kv.has_floats else None

        self._queue(work, lambda c: self._not_finite(watched, look, c))
        # Only now: if the device had no memory for it, there is no checksum to compare with.
        watched.sealed[pages] = True

    def _compare(self, watched: Watched, pages: Pages) -> None:
        """Compare sealed pages."""
        self._queue(
            lambda: watched.kv.changed(watched.on_device(pages)), self._comparing(watched, pages)
        )

    def _comparing(self, watched: Watched, pages: Pages) -> Callable[[Pages], None]:
        """Note that sealed pages are compared now. Returns what takes the codes of that."""
        self.context.checked(len(pages), "checksums of pages")
        look = watched.look(pages, self.context.recorder.step)
        watched.checked_at[pages] = look.step
        if len(pages):
            watched.looks.append(look)
        return lambda c: self._changed(watched, look, c)

    def _written_in(
        self,
        watched: Watched,
        work: Callable[[], torch.Tensor],
        pages: int,
        step: int,
        idle: bool,
        reads: Sequence[torch.Tensor] = (),
    ) -> None:
        self.context.checked(pages, "stamps of pages")
        self._queue(work, lambda c: self._written(watched, step, idle, c), reads)

    # --- what came of it ------------------------------------------------------------------------

    def _queue(
        self,
        work: Callable[[], torch.Tensor | None],
        enter: Callable[[Pages], None] | None = None,
        reads: Sequence[torch.Tensor] = (),
    ) -> None:
        """Queue work on the device, and call ``enter`` with its words when they have arrived."""
        entered = None if enter is None else (lambda words: self._arrived(enter, words))
        self.lane.queue(work, entered, reads)

    def _written(self, watched: Watched, step: int, idle: bool, codes: Pages) -> None:
        for code, count, page in codes.T[codes[0] > 0].tolist():
            if idle:  # report it only once
                watched.stamped[page] = False
            of = watched, page, code, count, step, idle
            self._report("write-after-free", page, report.describe_written, *of)

    def _changed(self, watched: Watched, look: Look, codes: Pages) -> None:
        watched.looks = [other for other in watched.looks if other is not look]
        for i in codes[0].nonzero()[0].tolist():
            page, (code, count) = int(look.pages[i]), codes[:, i].tolist()
            if page in look.others:
                continue  # it had been handed out before it was compared: that is its new KV
            if watched.sealed_at[page] == look.sealed_at[i]:
                watched.sealed[page] = False  # report it only once
            self._report("kv-changed", page, report.describe_changed, watched, look, i, code, count)

    def _not_finite(self, watched: Watched, look: Look, codes: Pages) -> None:
        for i in codes[0].nonzero()[0].tolist():
            page, (code, count) = int(look.pages[i]), codes[:, i].tolist()
            self._report("nan", page, report.describe_not_finite, watched, look, i, code, count)

    def _report(
        self,
        kind: str,
        page: int,
        describe: Callable[..., report.Found],
        watched: Watched,
        *of: Any,
    ) -> None:
        def make() -> tuple[Finding, Evidence]:
            finding, events = describe(watched, self.ledger, *of)
            return finding, Evidence(events=events)

        got = f"{watched.pool.name} page {page}"
        self.context.trap.report(*self.context.described(kind, "scheduler.run_batch", got, make))

    def _of(self, allocator: Any) -> Sequence[Watched]:
        """What is watched of an allocator's pages."""
        names = () if self.ledger.broken else self._names.get(id(allocator), ())
        return [self.pools[name] for name in names if name in self.pools]


def _verified(batch: Any) -> bool:
    """True if the target has verified a draft for this batch."""
    algorithm = getattr(batch, "spec_algorithm", None)
    return algorithm is not None and not algorithm.is_none() and batch.forward_mode.is_decode()


def limits(server_args: Any) -> list[str]:
    """Why KV cannot be judged on this server; empty if it can."""
    found = moving_pages(server_args, takes_snapshots(server_args))
    for name, why in (
        ("enable_hierarchical_cache", "the hierarchical cache copies KV on streams of its own"),
        ("enable_lmcache", "LMCache copies KV on streams of its own"),
        ("enable_flexkv", "FlexKV copies KV on streams of its own"),
        ("enable_unified_cache_external_linker", "an external KV store fills pages by itself"),
        ("radix_cache_backend", "who moves KV in a prefix cache of somebody else's is not known"),
        ("enable_hisparse", "HiSparse exchanges the KV in a page"),
        ("enable_unified_memory", "the unified memory pool moves KV from page to page"),
        ("dllm_algorithm", "a diffusion language model rewrites committed KV"),
    ):
        if server_argument(server_args, name):
            found.append(why)
    return found


TRACER = Tracer(
    id="kv-integrity",
    title="nobody writes into a freed KV page, and committed KV does not change (opt-in)",
    install=lambda context: KvIntegrityTracer(context).install(),
    ledger=True,
    opt_in=True,
)
