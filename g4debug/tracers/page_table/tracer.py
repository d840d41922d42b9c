"""page-table: every live cell of a page table holds the page that belongs there.

The check runs where the table is handed to the attention kernel, because the layer, its pool and
its table are known together there, and because a table that is never handed over is read by no
kernel. Where that is, and whether it is a page table or a list of tokens, is known by one file for
each attention backend (:mod:`g4debug.backends`). A table is checked once for
each forward and pool: at the first layer of the pool. The other layers of that pool reuse the
result. When the layer that was checked first is called again, a new forward has begun.

On a GPU the check is a kernel, the guard (:mod:`g4debug.tracers.page_table.guard`). It is captured
into SGLang's CUDA graphs together with the attention. After each step the host looks at what the
guard has left in pinned memory.

A cell is compared with ``req_to_token`` and with the shadow of the page ledger. With overlap
scheduling it is compared with a copy of these, made when the forward was launched
(:mod:`g4debug.sanitizer.forward_snapshots`). If pages change hands while a forward reads them, for
any other reason, only ranges are checked (:func:`g4debug.sanitizer.unsupported.moving_pages`). If
the class of the allocator is not SGLang's own, it is not known which pages are free
(:mod:`g4debug.ledger.pool_registry`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from g4debug.backends import aside, installed, names, phases
from g4debug.backends.base import PHASES, Adapter
from g4debug.backends.handed_over import PageTable, TokenLists
from g4debug.combinations.seen import ENCODER, NO_DRAFT, running
from g4debug.findings.record import Evidence, Finding
from g4debug.hooking.layer_pools import pages_of, pool_of_layer
from g4debug.sanitizer import unsupported
from g4debug.sanitizer.device_check import DeviceCheck, Key
from g4debug.sanitizer.trap_buffer import Left, Record
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.page_table import check, guard, token_check, token_guard
from g4debug.tracers.page_table.checked_table import Cell, CheckedTable, cell_of
from g4debug.tracers.page_table.token_check import Repair
from g4debug.tracers.silence import CALLED

# Spare cells behind a table's last row, which a kernel reads if that row is too short.
SLACK = 4096


class PageTableTracer(DeviceCheck[CheckedTable, Cell]):
    def __init__(self, context: Context) -> None:
        super().__init__(context, "bad cells")
        self.least = Repair.UNSAFE  # what is changed of lists where no mode asks for more
        self.adapters: dict[int, Adapter] = {}  # by id() of the backends built in this process
        self.page_sizes: dict[int, int] = {}  # by the same
        self.drafts: set[int] = set()  # id() of backends of draft runners
        # By id() of a backend: the phases in which some of its forwards are not judged.
        self.in_part: dict[int, set[str]] = {}
        self._unjudged: set[int] = set()  # id() of backends of which nothing is
        self._not_guarded: set[tuple[str, str]] = set()
        self._blind: set[str] = set()  # modes of batches of which no forward is judged
        self._met_in = -1  # the last step in which something was met that is not to be judged
        self._met_early = False  # or it was met in none, as when a CUDA graph is captured
        self._judged_in: set[str] = set()  # modes of batches in which something was judged
        self._counted = 0  # things that were judged up to the last step
        # (id() of the backend, number of the layer) -> the pool that the layer reads, which is the
        # same one at every forward; and the key of its last check.
        self._pools: dict[tuple[int, int], str] = {}
        self._keys: dict[tuple[int, int], Key] = {}

    def rests(self, mode: str) -> str:
        """Why no forward of this step is judged: a limit has said it of its phase or its lists, or
        its kernels read no pages."""
        # What was met before the first step may be of another mode than one that was judged.
        early = self._met_early and mode not in self._judged_in
        met = early or self._met_in == self.context.recorder.step
        return (
            "there is nothing to judge, or a limit says what" if met or mode in self._blind else ""
        )

    def install(self) -> None:
        self.context.status.rests = self.rests
        for adapter in installed():
            self.context.after(adapter.built, self.after_built(adapter))
            if not self.is_refused(adapter):
                adapter.install(self.context, self)
        self.follow()
        self.context.after("scheduler.init", self.after_scheduler_init)

    def before_run_batch(self, *args: Any, **kwargs: Any) -> None:
        aside.step()
        super().before_run_batch()

    def after_run_batch(
        self, result: Any, scheduler: Any, batch: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        counted = sum(t.count for what, t in self._tallies.items() if what != CALLED)
        mode = getattr(getattr(batch, "forward_mode", None), "name", "")
        if counted != self._counted and mode:
            self._judged_in.add(mode)
        self._counted = counted
        return super().after_run_batch(result, scheduler, batch, *args, **kwargs)

    def is_refused(self, adapter: Adapter) -> bool:
        """True if this backend was never run here, and a finding would do more than be reported."""
        settings = self.context.settings
        return not adapter.is_judged(settings, settings.cpu or not torch.cuda.is_available())

    def after_built(self, adapter: Adapter) -> Callable[..., Any]:
        """The hook at the site at which the backends of an adapter are built."""

        def after_backend_init(result: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
            if not adapter.is_inherited_by(backend):
                self.after_backend_init(adapter, backend, *args, **kwargs)
            return result

        return after_backend_init

    def after_backend_init(
        self,
        adapter: Adapter,
        backend: Any,
        model_runner: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """A backend was built."""
        if self.is_refused(adapter):
            self._limit(
                unsupported.BACKEND.format(adapter.name),
                "it was never run with this tracer on this SGLang and this kind of machine, so a "
                "finding could be false; G4DEBUG_MODE=log reports only, and "
                "G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1 takes that risk",
            )
            return
        key = id(backend)
        why = unsupported.other_rows(getattr(model_runner, "server_args", None))
        if why:
            self._unjudged.add(key)
            self._limit(unsupported.BACKEND.format(adapter.name), why)
            return
        self.adapters[key] = adapter
        self.page_sizes[key] = adapter.page_size(backend, model_runner)
        if getattr(model_runner, "is_draft_worker", False):
            self.drafts.add(key)
        if adapter.learn(backend, model_runner, self):
            self.backends.learn(backend, model_runner, self.page_sizes[key])
        else:
            self.judged_in_part([backend])

    def after_scheduler_init(
        self, result: Any, scheduler: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.adapters and not self._not_guarded:
            self.context.off(
                f"this server has no {names()} attention backend, so there is nothing to check"
            )
            return result
        unsupported.tell_of_later_sizes(self.context, scheduler)
        for why in sorted(self.backends.limits):
            self.context.limit("ranges only", why)
        part = self.backends.partial
        if part is not None:
            self.context.limit(part.what, part.why)
        if scheduler is not None:
            found = running(scheduler)
            if found.attention == ENCODER and found.draft != NO_DRAFT:
                self._limit(
                    "nothing that encoder attention reads in a verify is judged",
                    "a kernel may get a table of its own there, which the guard does not see",
                )
            served = phases.of(scheduler, self.adapters, self.in_part)
            if served:
                print(phases.line(served), file=sys.stderr, flush=True)
            self._blind = phases.blind_modes(served)
            self._met_early |= not served and bool(self._not_guarded)
            for phase in served:
                if not phase.guarded:
                    self._limit(
                        unsupported.PHASE.format(phase.name),
                        f"it runs on {phase.backend}, which is not guarded on this server",
                    )
        return result

    def judged_in_part(self, backends: Iterable[Any], phases: Iterable[str] = PHASES) -> None:
        phases = set(phases)
        for backend in backends:
            self.in_part.setdefault(id(backend), set()).update(phases)

    def not_guarded(self, what: str, why: str) -> None:
        """Something that goes to a kernel now is not judged. Said once."""
        self._met_in = self.context.recorder.step
        self._met_early |= self._met_in == 0
        self._limit(what, why)

    def reads_nothing(self) -> None:
        """There is nothing to judge in the forward that runs now."""
        self._met_in = self.context.recorder.step

    def _limit(self, what: str, why: str) -> None:
        if (what, why) not in self._not_guarded:
            self._not_guarded.add((what, why))
            self.context.limit(what, why)

    def again(self, table: torch.Tensor, backend: Any, layer: Any) -> torch.Tensor | None:
        """The table for the kernel, if it was checked for another layer of the forward, or None."""
        latest = self._known(table, backend, layer)
        if latest is None:
            return None
        return latest.out if self.contain else table

    def listed(self, indices: torch.Tensor, backend: Any, layer: Any) -> bool:
        """True if these entries of lists were checked for another layer of the forward."""
        return self._known(indices, backend, layer) is not None

    def _known(self, table: torch.Tensor, backend: Any, layer: Any) -> CheckedTable | None:
        """The check of this table for another layer of the forward. None if there was none."""
        key = self._keys.get((id(backend), layer.layer_id))
        latest = None if key is None else self.latest.get(key)
        return latest if latest is not None and latest.is_for(table, layer) else None

    def page_table(
        self, adapter: Adapter, handed: PageTable, backend: Any, layer: Any, batch: Any
    ) -> torch.Tensor:
        """Check the table. Returns the one for the kernel: a safe one, or in log mode SGLang's."""
        if id(backend) in self._unjudged:
            return handed.table
        key, table = self._key(backend, layer, batch), handed.table
        latest = self.latest.get(key)
        if latest is None or not latest.is_for(table, layer):
            if self._is_without_window(key, handed.window):
                return table
            if latest is None or not self._renewed(latest, table, layer, batch):
                latest = self._new(key, adapter, table, table.shape[0], backend, layer, batch)
                latest.out = self.buffer(key, table, torch.int32, SLACK)
            latest.seq_lens, latest.cu_q = handed.seq_lens, handed.cu_q
            latest.window = handed.window if latest.pool_name == "swa" else -1
            self._check(key, latest)
        assert latest.out is not None
        return latest.out if self.contain else table

    def token_lists(
        self, adapter: Adapter, lists: TokenLists, backend: Any, layer: Any, batch: Any
    ) -> None:
        """Check the lists, and replace bad entries; change nothing in log mode."""
        if id(backend) in self._unjudged:
            return
        key = self._key(backend, layer, batch, ", window" if lists.window >= 0 else "")
        latest, indices = self.latest.get(key), lists.indices
        if latest is not None and latest.is_for(indices, layer):
            return
        if self._is_without_window(key, lists.window):
            return
        if latest is None or not self._renewed(latest, indices, layer, batch):
            latest = self._new(key, adapter, indices, lists.rows, backend, layer, batch)
        latest.lists, latest.window = lists, lists.window
        self._check(key, latest)

    def layers_of(self, backend: Any) -> Sequence[Any]:
        """None: a list is checked where a layer gets it, whatever was done to it until then."""
        return ()

    def _key(self, backend: Any, layer: Any, batch: Any, which: str = "") -> Key:
        of = id(backend), layer.layer_id
        name = self._pools.get(of)
        if name is None:
            name = self._pools[of] = pool_of_layer(backend, layer, batch)[1]
        key = self._keys[of] = id(backend), name + which
        return key

    def _is_without_window(self, key: Key, window: int) -> bool:
        """True if a layer reads the SWA pool and names no window, so what it reads is not known.

        Llama-4's layers (``use_irope``) read the chunk that a token is in.
        """
        if window >= 0 or not key[1].startswith("swa"):
            return False
        self.not_guarded(
            "nothing that layers of the SWA pool read without a window is judged",
            "which of a request's tokens such a layer reads is not known, and its other pages are "
            "given back",
        )
        return True

    def _renewed(self, checked: CheckedTable, table: torch.Tensor, layer: Any, batch: Any) -> bool:
        """True if the last check of this key could be reused for a new forward.

        That saves a forward outside of CUDA graphs most of the host's work, because only the table
        or list, the lengths and the rows differ from the one before. A check that is in a graph, or
        that may be asked for later because its forward is still in flight, stays as it is.
        """
        if checked.captured or self.snapshots.copy is not None:
            return False
        if table.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if checked.truth is not None:
            indices = self._rows_of_truth(checked, table, batch)
            if indices is None:
                return False
            checked.truth.req_pool_indices = indices
        else:
            other_shape = checked.lists is None and checked.table.shape != table.shape
            if other_shape or self.has_truth(checked.backend, False):
                return False
        checked.table, checked.layer, checked.batch = table, layer, batch
        return True

    def _rows_of_truth(
        self, checked: CheckedTable, table: torch.Tensor, batch: Any
    ) -> torch.Tensor | None:
        """The rows of ``req_to_token`` of a new forward, whose truth is else that of the last one.
        None if it is another one, or if it is not known whether it is.
        """
        truth, ledger = checked.truth, self.context.ledger
        if not self.has_truth(checked.backend, False) or checked.lists is not None:
            return None
        if ledger is None or truth is None or truth.shadow is None:
            return None
        if truth.shadow is not ledger.shadow or checked.table.shape != table.shape:
            return None
        indices = checked.adapter.indices(checked.backend, batch)
        return indices if indices is not None and indices.shape[0] >= table.shape[0] else None

    def _new(
        self,
        key: Key,
        adapter: Adapter,
        table: torch.Tensor,
        rows: int,
        backend: Any,
        layer: Any,
        batch: Any,
    ) -> CheckedTable:
        """The fields of a check that page tables and lists of tokens have in common."""
        mailbox, captured = self.mailbox(key, table)
        pool, name = pool_of_layer(backend, layer, batch)
        page_size = self.page_sizes.get(id(backend), 0)
        if not page_size:  # it was built before the tracer was armed
            page_size = adapter.page_size(backend, None)
        truth = None
        if self.has_truth(backend, captured):
            frozen = self.backends.is_frozen(backend)
            padding = adapter.padding(backend, batch, frozen) if captured else 0
            indices = adapter.indices(backend, batch)
            if indices is None or indices.shape[0] < rows:
                self._limit(
                    "ranges only, where a forward has more rows than requests",
                    "it is not known whose each of these rows is",
                )
            truth = self.backends.truth(backend, batch, indices, rows, name, padding)
        return CheckedTable(
            adapter=adapter,
            backend=backend,
            layer=layer,
            batch=batch,
            table=table,
            pool_name=name,
            pages=pages_of(pool, layer, page_size),
            page_size=page_size,
            truth=truth,
            mailbox=mailbox,
            captured=captured,
        )

    def _check(self, key: Key, it: CheckedTable) -> None:
        assert self.trap is not None
        on_gpu = it.table.is_cuda
        if it.lists is not None:
            self.trap.keep_cells(it.mailbox)
            repair = Repair.ALL if self.repair else self.least
            (token_guard.launch if on_gpu else token_check.reference)(
                it.lists,
                self.trap,
                it.mailbox,
                it.pages * it.page_size,
                it.page_size,
                it.truth,
                repair if self.contain else Repair.NOTHING,
            )
        else:
            assert it.out is not None
            assert it.seq_lens is not None
            (guard.launch if on_gpu else check.reference)(
                it.table,
                it.out,
                it.seq_lens,
                it.cu_q,
                self.trap,
                it.mailbox,
                it.pages,
                it.page_size,
                it.window,
                it.truth,
                self.repair,
                self.least is Repair.RANGES,
            )
        self.launched(key, it, on_gpu, 1, "tables" if it.lists is None else "token lists")

    def remembered(self, checked: CheckedTable) -> CheckedTable:
        return checked.remembered()

    def seen(self, checked: CheckedTable | None, record: Record) -> Cell:
        return cell_of(record, checked)

    def words(self, checked: CheckedTable | None, seen: Cell) -> str:
        table = "a page table" if checked is None or checked.lists is None else "a list of tokens"
        return f"{seen.kind.name.lower()} in row {seen.row}, column {seen.column}, of {table}"

    # These import what they need when something was seen, so that a guard without books needs no
    # module of the ledger.
    def confirm(self, checked: CheckedTable, seen: Cell) -> Cell:
        from g4debug.tracers.page_table.confirm import confirm

        return confirm(checked, seen, self.context.ledger, self.context.recorder)

    def describe(
        self, checked: CheckedTable | None, seen: Cell, left: Left
    ) -> tuple[Finding, Evidence]:
        from g4debug.tracers.page_table.report import describe

        recorder, ledger = self.context.recorder, self.context.ledger
        draft = checked is not None and id(checked.backend) in self.drafts
        finding, table, events = describe(checked, seen, left, recorder, draft, ledger)
        return finding, Evidence(table=table, events=events)

    def bare(self, checked: CheckedTable | None, seen: Cell, left: Left) -> Finding:
        from g4debug.tracers.page_table.report import bare

        return bare(checked, left.record, self.context.recorder)


TRACER = Tracer(
    id="page-table",
    title="a page table names the right pages: those that req_to_token and the allocators say",
    install=lambda context: PageTableTracer(context).install(),
    ledger=True,
    without_ledger="ranges, and in full layers req_to_token",
    each_forward=True,
)
