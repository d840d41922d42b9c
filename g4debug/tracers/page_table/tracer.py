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

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from g4debug.backends import adapters, phases
from g4debug.backends.base import Adapter
from g4debug.backends.handed_over import PageTable, TokenLists
from g4debug.findings.record import Evidence
from g4debug.hooking import targets
from g4debug.hooking.layer_pools import pages_of, pool_of_layer
from g4debug.sanitizer import unsupported
from g4debug.sanitizer.backend_state import Books
from g4debug.sanitizer.device_check import TrapTracer
from g4debug.sanitizer.trap_buffer import Left, TrapBuffer
from g4debug.settings import Settings
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.page_table import guard as page_guard
from g4debug.tracers.page_table import token_guard
from g4debug.tracers.page_table.check import Truth
from g4debug.tracers.page_table.checked_table import Launch, cell_of
from g4debug.tracers.page_table.confirm import has_ended, is_real
from g4debug.tracers.page_table.report import Unconfirmed, bare, describe
from g4debug.tracers.page_table.token_guard import Repair

# Spare cells behind a table's last row, which a kernel reads if that row is too short.
SLACK = 4096
# What cannot be right, whoever's row it is.
logger = logging.getLogger("g4debug")


def judges(backend: str, settings: Settings, on_cpu: bool) -> bool:
    """True if what this attention backend hands over is judged here.

    Where it was never run with this tracer, a finding must not do more than be reported. on_cpu:
    SGLang runs on the CPU engine.
    """
    if settings.mode == "log" or settings.not_run_on_this_release:
        return True
    return targets.backend_was_run(backend, on_cpu)


class PageTableTracer(TrapTracer[Launch]):
    def __init__(self, context: Context) -> None:
        super().__init__(context, "bad cells")
        self.adapters: dict[int, Adapter] = {}  # by id() of the backends built in this process
        self.page_sizes: dict[int, int] = {}  # by the same
        self.drafts: set[int] = set()  # id() of backends of draft runners
        self.in_part: set[int] = set()  # id() of backends of which some lists are not judged
        self._unjudged: set[int] = set()  # id() of backends of which nothing is
        self.books = Books(context.ledger, self.in_flight)
        self._not_guarded: set[tuple[str, str]] = set()
        self._latest: dict[tuple[int, str], Launch] = {}
        # The key of each layer that was seen: id() of the backend and its number -> that of its
        # launches. A layer reads the same pool at every forward.
        self._keys: dict[tuple[int, int], tuple[int, str]] = {}
        self._buffers: dict[tuple[int, str], list[torch.Tensor]] = {}
        self._views: dict[tuple[int, str], torch.Tensor] = {}  # what was taken of them last

    def install(self) -> None:
        for adapter in adapters():
            self.context.after(adapter.built, self.after_built(adapter))
            if not self.is_refused(adapter):
                adapter.install(self.context, self)
        self.follow()
        self.context.after("scheduler.init", self.after_scheduler_init)

    def is_refused(self, adapter: Adapter) -> bool:
        """True if this backend was never run here, and a finding would do more than be reported."""
        settings = self.context.settings
        return not judges(adapter.name, settings, settings.cpu or not torch.cuda.is_available())

    def after_built(self, adapter: Adapter) -> Callable[..., Any]:
        """The hook at the site at which the backends of an adapter are built."""

        def after_backend_init(result: Any, *args: Any, **kwargs: Any) -> Any:
            self.after_backend_init(adapter, *args, **kwargs)
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
            self.not_guarded(
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
            self.not_guarded(unsupported.BACKEND.format(adapter.name), why)
            return
        self.adapters[key] = adapter
        self.page_sizes[key] = adapter.page_size(backend, model_runner)
        if getattr(model_runner, "is_draft_worker", False):
            self.drafts.add(key)
        if adapter.learn(backend, model_runner, self):
            self.books.learn(backend, model_runner, self.page_sizes[key])
        else:
            self.judged_in_part([backend])

    def after_scheduler_init(
        self, result: Any, scheduler: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.adapters and not self._not_guarded:
            names = " or ".join(adapter.name for adapter in adapters())
            self.context.off(
                f"this server has no {names} attention backend, so there is nothing to check"
            )
            return result
        for why in sorted(self.books.limits):
            self.context.limit("ranges only", why)
        if self.books.partial is not None:
            self.context.limit(*self.books.partial)
        if scheduler is not None:
            built = {key: adapter.name for key, adapter in self.adapters.items()}
            found = phases.of(scheduler, built, self.in_part)
            if found:
                print(phases.line(found), file=sys.stderr, flush=True)
            for phase in found:
                if not phase.guarded:
                    self.not_guarded(
                        unsupported.PHASE.format(phase.name),
                        f"it runs on {phase.backend}, which is not guarded on this server",
                    )
        return result

    def judged_in_part(self, backends: Iterable[Any]) -> None:
        self.in_part.update(map(id, backends))

    def not_guarded(self, what: str, why: str) -> None:
        """Something that goes to a kernel is not judged. Said once."""
        if (what, why) not in self._not_guarded:
            self._not_guarded.add((what, why))
            self.context.limit(what, why)

    def again(self, table: torch.Tensor, backend: Any, layer: Any) -> torch.Tensor | None:
        """What the kernel gets, if this table was checked for another layer of the forward."""
        latest = self._known(table, backend, layer)
        if latest is None:
            return None
        return latest.out if self.contain else table

    def listed(self, indices: torch.Tensor, backend: Any, layer: Any) -> bool:
        """True if these entries of lists were checked for another layer of the forward."""
        return self._known(indices, backend, layer) is not None

    def _known(self, table: torch.Tensor, backend: Any, layer: Any) -> Launch | None:
        """The check of this table for another layer of the forward. None if there was none."""
        key = self._keys.get((id(backend), layer.layer_id))
        latest = None if key is None else self._latest.get(key)
        return latest if latest is not None and latest.is_for(table, layer) else None

    def page_table(
        self, adapter: Adapter, handed: PageTable, backend: Any, layer: Any, batch: Any
    ) -> torch.Tensor:
        """Check the table. Returns the one for the kernel: a safe one, or in log mode SGLang's."""
        if id(backend) in self._unjudged:
            return handed.table
        pool, name = pool_of_layer(backend, layer, batch)
        key, table = (id(backend), name), handed.table
        self._keys[id(backend), layer.layer_id] = key
        latest = self._latest.get(key)
        if latest is None or not latest.is_for(table, layer):
            if latest is None or not self._renewed(latest, table, layer, batch):
                rows = table.shape[0]
                latest = self._launch(key, adapter, table, rows, backend, layer, batch, pool)
                latest.out = self._buffer(key, table)
            latest.seq_lens, latest.cu_q = handed.seq_lens, handed.cu_q
            latest.window = handed.window if name == "swa" else -1
            self._check(latest)
            self._latest[key] = latest
        assert latest.out is not None
        return latest.out if self.contain else table

    def token_lists(
        self, adapter: Adapter, lists: TokenLists, backend: Any, layer: Any, batch: Any
    ) -> None:
        """Check the lists, and change what a kernel must not read; nothing in log mode."""
        if id(backend) in self._unjudged:
            return
        pool, name = pool_of_layer(backend, layer, batch)
        key = (id(backend), f"{name}, window" if lists.window >= 0 else name)
        self._keys[id(backend), layer.layer_id] = key
        latest, indices = self._latest.get(key), lists.indices
        if latest is not None and latest.is_for(indices, layer):
            return
        latest = self._launch(key, adapter, indices, lists.rows, backend, layer, batch, pool)
        latest.lists, latest.window = lists, lists.window
        self._check(latest)
        self._latest[key] = latest

    def _renewed(self, launch: Launch, table: torch.Tensor, layer: Any, batch: Any) -> bool:
        """True if the last launch of this key was made to be that of a new forward.

        That saves a decode step outside of CUDA graphs most of the host's work, because only the
        table, the lengths and the rows differ from the step before. A launch that is in a graph, or
        that may be asked for later because its forward is still in flight, stays as it is.
        """
        truth, ledger = launch.truth, self.context.ledger
        if launch.captured or truth is None or self.in_flight.copy is not None:
            return False
        if ledger is None or truth.shadow is None or truth.shadow is not ledger.shadow:
            return False
        if launch.table.shape != table.shape:
            return False
        if table.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        indices = launch.adapter.indices(launch.backend, batch)
        if indices is None or indices.shape[0] < table.shape[0]:
            return False
        truth.req_pool_indices = indices
        launch.table, launch.layer, launch.batch = table, layer, batch
        return True

    def _launch(
        self,
        key: tuple[int, str],
        adapter: Adapter,
        table: torch.Tensor,
        rows: int,
        backend: Any,
        layer: Any,
        batch: Any,
        pool: Any,
    ) -> Launch:
        """What both shapes of a hand-over have in common. key: of its slot, if not captured."""
        slot, captured = self.slot(key, table)
        name, page_size = key[1].partition(",")[0], self.page_sizes.get(id(backend), 0)
        if not page_size:  # it was built before the tracer was armed
            page_size = adapter.page_size(backend, None)
        launch = Launch(
            adapter=adapter,
            backend=backend,
            layer=layer,
            batch=batch,
            table=table,
            pool_name=name,
            pages=pages_of(pool, layer, page_size),
            page_size=page_size,
            truth=self._truth(adapter, backend, batch, name, rows, captured),
            slot=slot,
            captured=captured,
        )
        self.launches[slot] = launch
        return launch

    def _check(self, launch: Launch) -> None:
        assert self.trap is not None
        on_gpu = launch.table.is_cuda
        self.remember(launch)
        if launch.lists is not None:
            self.trap.keep_cells(launch.slot)
            check = token_guard.launch if on_gpu else token_guard.reference
            repair = Repair.ALL if self.repair else Repair.UNSAFE
            check(
                launch.lists,
                self.trap,
                launch.slot,
                launch.pages * launch.page_size,
                launch.page_size,
                launch.truth,
                repair if self.contain else Repair.NOTHING,
            )
            what = "token lists"
        else:
            assert launch.out is not None
            assert launch.seq_lens is not None
            guard = page_guard.launch if on_gpu else page_guard.reference
            guard(
                launch.table,
                launch.out,
                launch.seq_lens,
                launch.cu_q,
                self.trap,
                launch.slot,
                launch.pages,
                launch.page_size,
                launch.window,
                launch.truth,
                self.repair,
            )
            what = "tables"
        self.context.checked(1, f"{what} captured in CUDA graphs" if launch.captured else what)
        if not on_gpu:
            self.poll()

    def _truth(
        self, adapter: Adapter, backend: Any, batch: Any, name: str, rows: int, captured: bool
    ) -> Truth | None:
        if self.is_strange(captured):
            return None
        return self.books.truth(adapter, backend, batch, name, rows, captured)

    def _buffer(self, key: tuple[int, str], table: torch.Tensor) -> torch.Tensor:
        """Contiguous int32 memory of the table's shape, for the safe table.

        There is one buffer for each backend and pool, and a larger one when that is needed. A
        captured CUDA graph keeps pointing at the buffer that it was captured with, so buffers that
        became too small are kept.
        """
        view = self._views.get(key)
        if view is not None and view.shape == table.shape:
            return view
        rows, columns = table.shape
        kept = self._buffers.setdefault(key, [])
        if not kept or kept[-1].numel() < rows * columns + SLACK:
            cells = rows * columns + SLACK
            kept.append(torch.zeros(cells, dtype=torch.int32, device=table.device))
        view = self._views[key] = kept[-1][: rows * columns].view(rows, columns)
        return view

    def kept(self, launch: Launch) -> Launch:
        return launch.remembered()

    def report(self, trap: TrapBuffer) -> None:
        recorder, ledger, found = self.context.recorder, self.context.ledger, []
        for left in trap.take():
            launch = self.launch_of(left)
            draft = launch is not None and id(launch.backend) in self.drafts
            if not self._is_real(launch, left):
                continue
            try:
                found.append(describe(launch, left, recorder, draft, ledger))
            except Unconfirmed as e:
                assert ledger is not None
                assert ledger.owners is not None
                ledger.owners.doubt(e.page, str(e))
            except Exception:
                # A bug of ours must not hide the finding: the kernel's table was safe, not right.
                logger.exception("g4debug: page-table: a finding cannot be described in full")
                found.append((bare(launch, left.fields, recorder), None, ()))
        self.account.give(trap)
        for finding, table, events in found:  # in raise mode the first one raises
            self.context.trap.report(finding, Evidence(table=table, events=events))

    def _is_real(self, launch: Launch | None, left: Left) -> bool:
        """True if SGLang's own structures confirm what the guard saw. If not, it is said why."""
        ledger, cell = self.context.ledger, cell_of(left.fields, launch)
        table = "a page table" if launch is None or launch.lists is None else "a list of tokens"
        what = f"{cell.kind.name.lower()} in row {cell.row}, column {cell.column}, of {table}"
        left_early = cell.step >= 0 and self.in_flight.is_void(cell.step, cell.request)
        if left_early and not cell.kind.record.ended:
            logger.info(
                "g4debug: page-table: nothing is reported of %s, because its request had ended "
                "before the result of step %d was looked at",
                what,
                cell.step,
            )
            return False
        try:
            if is_real(launch, cell, ledger):
                return True
        except Exception as e:
            logger.exception("g4debug: page-table: SGLang's own structures cannot be asked")
            why = f"page-table could not confirm what it saw ({type(e).__name__})"
            if ledger is not None:
                ledger.give_up(why)
            return False
        assert ledger is not None, "without a ledger nothing needs to be confirmed"
        if launch is not None and has_ended(launch, cell, ledger):
            logger.warning(
                "g4debug: page-table: nothing is reported of %s, because its request has ended "
                "since then",
                what,
            )
        else:
            ledger.mistaken(what)
        return False


def install(context: Context) -> None:
    PageTableTracer(context).install()


TRACER = Tracer(
    id="page-table",
    title="a page table names the right pages: those that req_to_token and the allocators say",
    sites=(
        *(site for adapter in adapters() for site in (adapter.built, *adapter.sites)),
        "forward_batch.init_new",
        "scheduler.init",
        "scheduler.process_result",
        "scheduler.run_batch",
        "scheduler.run_event_loop",
        "scheduler.stream_output",
    ),
    install=install,
    ledger=True,
    without_ledger="ranges, and in full layers req_to_token",
)
