"""kv-writes: the KV of every token is written to its own place, and nowhere else.

A forward writes the K and V of each new token into a slot of a KV pool. If a slot is wrong,
somebody else's answer breaks, and nothing is noticed: the page table is right, the allocator is
right, and the KV behind them is another token's.

**Where the locations come from.** ``ForwardBatch.out_cache_loc`` is one tensor for each forward;
in a CUDA graph a static one, in which the rows of padding have location 0. The full layers get it
as it is. The sliding layers of a SWA pool get the same tokens' locations in that pool. Up to 0.5.13
``SWAKVPool.set_kv_buffer`` has them (``swa_loc``, or it translates by itself), later the attention
backend's metadata has (``swa_out_cache_loc``). All layers of one pool get the same ones. With FP8
KV on trtllm_mha a fused kernel writes, which gets them from ``_get_layer_cache_loc``.

**Where it looks.** At ``set_kv_buffer`` of MHATokenToKVPool and MLATokenToKVPool, which belongs to
the pool of one kind of layer and gets the real locations, whichever attention backend calls it; and
at ``_get_layer_cache_loc``. ``AttentionBackend.forward``, where every backend begins with a layer,
tells which forward it is; outside of a layer's attention, where MLA's model writes in a prefill,
``ModelRunner.forward`` does. It looks once for each forward and pool: at the first layer that
writes there. When that layer writes again, a new forward has begun.

**What must hold.** :mod:`g4debug.tracers.kv_writes.check` says it: token i of row r at position p
goes to ``req_to_token[r, p]``, in sliding layers to that token's place in the SWA pool; its page is
held, was handed out to this request, and is not one of the prefix cache; no two tokens go to one
place. The truth is the same as for page-table: SGLang's rows, and the shadow and the owners of the
page ledger; under overlap scheduling as they were when the forward was launched
(:mod:`g4debug.sanitizer.forward_snapshots`).

**What proves it.** A location that equals ``req_to_token`` is in range. It belongs to this request
alone, because the owners say to whom its page was handed out; the row alone would not show that it
names another request's page. Its page is held, because the shadow says so. And no other token of
the forward has it, because each location is stamped (:mod:`g4debug.tracers.kv_writes.kernels`): the
stamps also show a row that names a page twice, and need no books at all.

**Who writes nothing.** The draft of FROZEN_KV_MTP, which reads the target's KV, and the KV-shared
layers of E2B and E4B, which have none. So there is nothing to look at. Other drafts write into
pools of their own: which token each of their places is for was never worked out, so they are not
judged.

**What it does not see.** KV that is copied inside a pool (a verify with several draft paths,
``move_kv_cache``), or brought from elsewhere (HiCache, disaggregation); the values that are written
(:mod:`g4debug.tracers.kv_integrity`); more than ranges in a prefill inside of a CUDA graph; the
writes of a kernel of a model that rotates K and writes it at once (gpt-oss, Qwen3-MoE and others,
on some GPUs). Where a layer has KV and writes none that is seen, a limit says so.

**What it does.** On a GPU the check is two small kernels, which are captured into SGLang's CUDA
graphs with the write. They hand the write a copy of the locations. In the copy, a location that the
pool does not have is replaced by its right place, or by slot 0; in contain mode, every location
that is certainly wrong is. A layer that reads by these locations gets the copy, too
(:mod:`g4debug.tracers.kv_writes.read_back`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from g4debug.backends import installed
from g4debug.backends.parts import parts
from g4debug.findings.record import Evidence, Finding
from g4debug.hooking.arguments import argument
from g4debug.hooking.hooks import Order
from g4debug.hooking.layer_pools import pool_of_layer
from g4debug.sanitizer import unsupported
from g4debug.sanitizer.device_check import DeviceCheck, Key
from g4debug.sanitizer.trap_buffer import Left, Record, TrapBuffer
from g4debug.speculation import draft_reads_target_kv
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.kv_writes import check, kernels, read_back
from g4debug.tracers.kv_writes.check import Stamps
from g4debug.tracers.kv_writes.checked_writes import CheckedWrites, Write, write_of
from g4debug.tracers.kv_writes.confirm import confirm
from g4debug.tracers.kv_writes.forwards import rows_of
from g4debug.tracers.kv_writes.report import describe

# Only in these classes do all writes pass through our hooks -> the sites.
WRITES = {
    "MHATokenToKVPool": ("kv.set",),
    "MLATokenToKVPool": ("kv.set.mla", "kv.set.mla_parts"),
}


class KvWritesTracer(DeviceCheck[CheckedWrites, Write]):
    def __init__(self, context: Context) -> None:
        super().__init__(context, "bad locations")
        self.draft_writes = False  # a draft has KV of its own, which is not looked at
        self.unjudged = ""  # why nothing is judged, '' if writes are judged
        self._strange = False  # a pool was met, and its writes cannot be judged
        self._now: tuple[Any, Any, Any] | None = None  # backend, layer and batch that run
        self._outside: tuple[Any, Any] | None = None  # backend and batch of the model that runs
        self._written: Any = None  # the last layer of which a write was seen
        self._unseen: set[str] = set()  # modes in which there is one of which none was
        self._strange_in: set[str] = set()  # modes in which such a pool was written to
        self._stamps: dict[int, tuple[Any, Stamps]] = {}  # by id() of a pool
        self._places = context.isolate(self.checked_places)
        self._missed = context.isolate(self.missed)

    def rests(self, mode: str) -> str:
        """Why forwards of this mode are not judged: a limit has said it of their pool, or of it."""
        limited = self._unseen | self._strange_in
        return "the limits say what is not judged" if limited & forwards_of(mode) else ""

    def install(self) -> None:
        context = self.context
        context.status.rests = self.rests
        for adapter in installed():
            context.after(adapter.built, self.after_backend_init)
            for site in adapter.fused_writes:
                context.after(site, self.after_layer_cache_loc)
        put = context.hooks.around
        for site in ("attn.forward", "attn.forward.linear"):
            put(site, Order.TRACER, context.tracer_id, self.around_attention)
        put("runner.forward", Order.TRACER, context.tracer_id, self.around_model)
        around_write = self._around_write()
        for site in itertools.chain(*WRITES.values()):
            put(site, Order.TRACER, context.tracer_id, around_write)
        context.after("runner.attention", self.after_runner_attention)
        self.follow()
        context.after("scheduler.init", self.after_scheduler_init)

    def after_runner_attention(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        for backend in parts(runner.attn_backend):
            self.after_backend_init(None, backend, runner)
        return result

    def after_backend_init(
        self, result: Any, backend: Any, model_runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(model_runner, "is_draft_worker", False):
            self.draft_writes |= not draft_reads_target_kv(model_runner)
            return result
        self.unjudged = unsupported.other_rows(model_runner.server_args)
        if not self.unjudged:
            self.backends.learn(backend, model_runner, int(model_runner.page_size))
            self._prepare(getattr(model_runner, "token_to_kv_pool", None))
        return result

    def _prepare(self, pool: Any) -> None:
        """Make room for the stamps and records of a KV pool before a CUDA graph is captured.

        In a capture, the zeroing of new memory would become part of the graph.
        """
        for inner in (getattr(pool, "full_kv_pool", pool), getattr(pool, "swa_kv_pool", None)):
            if inner is not None and self._knows(inner):
                device = torch.device(inner.device)
                self._stamps_of(inner, device)
                self.trap = self.trap or TrapBuffer(device)

    def after_scheduler_init(
        self, result: Any, scheduler: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.backends.known:
            self.context.off(
                self.unjudged or "it has not seen how this server's attention backends were built"
            )
        if self.draft_writes:
            self.context.limit(
                "writes of the draft are not judged",
                "this kind of draft has KV of its own, and it was never worked out for which token "
                "each place is that its forwards write to",
            )
        unsupported.tell_of_later_sizes(self.context, scheduler)
        for why in sorted(self.backends.limits):
            self.context.limit("ranges, and tokens that are written to one place", why)
        return result

    # --- what runs -------------------------------------------------------------------------

    def around_attention(
        self, call_next: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """``forward(q, k, v, layer, forward_batch, ...)``: remember which forward writes."""
        layer = args[3] if len(args) > 3 else kwargs.get("layer")
        batch = args[4] if len(args) > 4 else kwargs.get("forward_batch")
        before, self._now = self._now, (backend, layer, batch)
        try:
            if read_back.shares(args, kwargs):
                if not self.contain:
                    return call_next(backend, *args, **kwargs)
                found = self._places(backend, batch) or []
                return read_back.call(found, lambda: call_next(backend, *args, **kwargs))
            result = call_next(backend, *args, **kwargs)
            if self._written is not layer and id(backend) in self.backends.known:
                self._missed(backend, layer, batch)
            return result
        finally:
            self._now = before

    def around_model(
        self, call_next: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """``forward(forward_batch, ...)``: remember whose writes come from outside of a layer."""
        batch = args[0] if args else kwargs.get("forward_batch")
        backend = getattr(runner, "attn_backend", None)
        before, self._outside = self._outside, (backend, batch)
        try:
            return call_next(runner, *args, **kwargs)
        finally:
            self._outside = before

    def missed(self, backend: Any, layer: Any, batch: Any) -> None:
        """A layer has KV of its own, and nothing of its write was seen."""
        loc, mode = batch.out_cache_loc, _called(batch)
        if self._strange:  # which writes by a function that is not hooked
            self._strange_in.add(mode)
        if mode in self._unseen or self._strange or loc is None or not loc.numel():
            return
        attending = getattr(backend, "full_attn_layers", None)
        if attending is not None and layer.layer_id not in attending:
            return
        self._unseen.add(mode)
        self.context.limit(
            f"some writes in {mode} forwards are not judged",
            f"layer {layer.layer_id} does not write its KV by set_kv_buffer; a kernel that does "
            "more than that may write it",
        )

    def checked_places(self, backend: Any, batch: Any) -> read_back.Places:
        """Where a layer without KV of its own finds the locations that were written to."""
        keys = ((id(backend), name) for name in ("full", "swa"))
        latest = [self.latest[key] for key in keys if key in self.latest]
        return read_back.places(backend, batch, latest)

    def _around_write(self) -> Callable[..., Any]:
        isolated = self.context.isolate(self.checked, keeps=True)

        def around(call_next: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
            """``set_kv_buffer(layer, loc, k, v, ...)``; later releases call it ``loc_info``."""
            if self._now is None and self._outside is None:
                return call_next(pool, *args, **kwargs)
            layer = args[0] if args else kwargs["layer"]
            self._written = layer if self._now is None else self._now[1]  # even if not judged
            if len(args) > 1:
                _, loc, *others = args
                return call_next(pool, layer, isolated(loc, pool, layer), *others, **kwargs)
            name = "loc_info" if "loc_info" in kwargs else "loc"
            kwargs[name] = isolated(kwargs[name], pool, layer)
            return call_next(pool, *args, **kwargs)

        return around

    def after_layer_cache_loc(self, loc: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        """``_get_layer_cache_loc(layer, forward_batch)``, for the fused kernel that writes FP8."""
        layer = argument(args, kwargs, 0, "layer")
        batch = argument(args, kwargs, 1, "forward_batch")
        if id(backend) not in self.backends.known:
            return loc
        pool, name = pool_of_layer(backend, layer, batch)
        self._written = layer
        return self._safe(loc, backend, layer, batch, pool, name)

    def checked(self, loc_info: Any, pool: Any, layer: Any = None) -> Any:
        """Check a layer's locations. Returns those it may write to: SGLang's, or a safe copy."""
        if self._now is not None:
            backend, layer, batch = self._now
        else:
            assert self._outside is not None
            backend, batch = self._outside
            if layer is None:  # a SWA pool does not pass it on; ``missed`` tells
                return loc_info
        if id(backend) not in self.backends.known:
            return loc_info
        inner, name = pool_of_layer(backend, layer, batch)
        if inner is not pool:
            return loc_info  # not one of the pools that this layer reads
        if isinstance(loc_info, torch.Tensor):
            return self._safe(loc_info, backend, layer, batch, pool, name)
        loc = self._safe(loc_info.loc, backend, layer, batch, pool, name)
        return loc_info if loc is loc_info.loc else dataclasses.replace(loc_info, loc=loc)

    def _safe(
        self, loc: torch.Tensor, backend: Any, layer: Any, batch: Any, pool: Any, name: str
    ) -> torch.Tensor:
        if not self._knows(pool):
            self._strange_in.add(_called(batch))
            return loc
        if not loc.numel():
            return loc
        key = (id(backend), name)
        latest = self.latest.get(key)
        if latest is None or not latest.is_for(layer, batch, loc):
            latest = self._check(key, loc, backend, layer, batch, pool)
        return latest.out if self.contain else loc

    def _knows(self, pool: Any) -> bool:
        """True if writes into this pool can be judged. If not, it is said why."""
        name = type(pool).__name__
        if name in WRITES:
            return True
        self._strange = True
        self.context.limit(
            f"writes into a {name} are not judged",
            "that KV pool writes by a function of its own, and it is not known how it numbers its "
            "slots",
        )
        return False

    def _check(
        self, key: Key, loc: torch.Tensor, backend: Any, layer: Any, batch: Any, pool: Any
    ) -> CheckedWrites:
        mailbox, captured = self.mailbox(key, loc)
        assert self.trap is not None
        rows = rows_of(batch, loc.numel(), captured)
        truth = None
        if rows.firsts is None:
            mode = _called(batch)
            self.context.limit(
                f"ranges, and tokens that are written to one place, in {mode} forwards"
                + (" inside of CUDA graphs" if captured else ""),
                "such a forward does not say which token each location is for",
            )
        elif self.has_truth(backend, captured):
            padding = int(backend.get_cuda_graph_seq_len_fill_value()) if captured else 0
            indices = batch.req_pool_indices
            truth = self.backends.truth(backend, batch, indices, rows.rows, key[1], padding)
        stamps = self._stamps_of(pool, loc.device)
        checked = CheckedWrites(
            backend=backend,
            layer=layer,
            batch=batch,
            loc=loc,
            out=self.buffer(key, loc, loc.dtype, 0),
            pool_name=key[1],
            slots=stamps.slots.shape[0],
            page_size=int(pool.page_size),
            rows=rows,
            truth=truth,
            mailbox=mailbox,
            captured=captured,
        )
        (kernels.launch if loc.is_cuda else check.reference)(
            loc.contiguous(),
            checked.out,
            stamps,
            self.trap,
            mailbox,
            checked.page_size,
            rows,
            truth,
            self.repair,
        )
        self.launched(key, checked, loc.is_cuda, loc.numel(), "locations")
        return checked

    def _stamps_of(self, pool: Any, device: torch.device) -> Stamps:
        """The stamps of a pool, which is kept, so that its id() stays its own."""
        if id(pool) not in self._stamps:
            slots = int(pool.size) + int(pool.page_size)
            self._stamps[id(pool)] = (pool, Stamps.new(slots, device))
        return self._stamps[id(pool)][1]

    def remembered(self, checked: CheckedWrites) -> CheckedWrites:
        return checked.remembered()

    def seen(self, checked: CheckedWrites | None, record: Record) -> Write:
        return write_of(record)

    def words(self, checked: CheckedWrites | None, seen: Write) -> str:
        what = f"{seen.kind.name.lower()} at position {seen.position} of row {seen.row}"
        return f"{what} of a forward's writes"

    def confirm(self, checked: CheckedWrites, seen: Write) -> Write:
        return confirm(checked, seen, self.context.ledger, self.context.recorder)

    def describe(
        self, checked: CheckedWrites | None, seen: Write, left: Left
    ) -> tuple[Finding, Evidence]:
        finding, events = describe(checked, seen, self.context.recorder, self.context.ledger)
        return finding, Evidence(events=events)

    def bare(self, checked: CheckedWrites | None, seen: Write, left: Left) -> Finding:
        return describe(None, seen, self.context.recorder, None)[0]


def _called(batch: Any) -> str:
    """The mode of a forward, as the limits call it."""
    name: str = batch.forward_mode.name
    return name.lower().replace("_", "-")


def forwards_of(mode: str) -> set[str]:
    """The modes of the target's forwards in a step of this mode, as the limits call them."""
    found = {mode.lower().replace("_", "-")}
    return found | ({"target-verify"} if mode == "DECODE" else set())


TRACER = Tracer(
    id="kv-writes",
    title="the KV of every token is written to its own place, once, and nowhere else",
    install=lambda context: KvWritesTracer(context).install(),
    ledger=True,
    without_ledger="ranges, tokens that are written to one place, and in full layers req_to_token",
    opt_in=True,
    each_forward=True,
)
