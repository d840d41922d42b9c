"""page-table: every live cell holds the page that req_to_token and the allocators say.

Sits where the table is handed to the attention kernel (``_get_layer_page_table``): there
the layer, its pool and its table are known together. Each table is checked once per
forward and pool: the first layer of a pool in a forward leads, the others of that pool
reuse its result; the leader coming round again means a new forward. On CUDA the check is a
kernel (:mod:`g4debug.tracers.page_table.guard`), captured into SGLang's CUDA graphs together
with the attention that it guards, and the host looks at pinned memory after each step.

What ``init_forward_metadata`` built is compared with ``req_to_token`` and the page ledger's
shadow here, at the hand-over: a table that is never handed over is read by no kernel. Where the
allocators change while a forward reads (overlap scheduling: they run on another stream) only
ranges are checked; see :func:`g4debug.tracers.page_table.truth.limits`. With and without a SWA
pool; only of an allocator whose class is not SGLang's own nothing is known of free pages
(:mod:`g4debug.ledger.feed`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from g4debug.findings.record import Evidence
from g4debug.hooking.layer_pools import pages_of, pool_of_layer
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.page_table import guard as page_guard
from g4debug.tracers.page_table.backends import trtllm_mha
from g4debug.tracers.page_table.launch import Launch
from g4debug.tracers.page_table.report import describe
from g4debug.tracers.page_table.trap_buffer import TrapBuffer
from g4debug.tracers.page_table.truth import Books

# Cells behind a table's last row that a kernel reads if that row is too short.
SLACK = 4096
logger = logging.getLogger("g4debug")


class PageTableTracer:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.contain = context.settings.mode != "log"
        self.trap: TrapBuffer | None = None
        self.launches: dict[int, Launch] = {}  # by slot of the trap buffer
        self.lost = False  # a sticky device error: nothing more can be read or checked
        self.backends = 0  # trtllm_mha backends built in this process
        self.drafts: set[int] = set()  # id() of backends of draft runners
        self.books = Books(context.ledger)
        self._latest: dict[tuple[int, str], Launch] = {}
        self._eager_slots: dict[tuple[int, str], int] = {}
        self._buffers: dict[tuple[int, str], list[torch.Tensor]] = {}

    def install(self) -> None:
        self.context.after(trtllm_mha.BUILT, self.after_backend_init)
        self.context.after(trtllm_mha.HANDED_OVER, self.after_page_table)
        self.context.after("scheduler.run_batch", self.after_run_batch)
        self.context.before("scheduler.stream_output", self.before_stream_output)
        # Where the kernel got the bad page after all (log mode), the context is dead by now,
        # but what the guard saw is in host memory.
        self.context.on_exception("scheduler.run_event_loop", self.poll)
        self.context.after("scheduler.init", self.after_scheduler_init)

    def after_backend_init(
        self, result: Any, backend: Any, model_runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.backends += 1
        if getattr(model_runner, "is_draft_worker", False):
            self.drafts.add(id(backend))
        self.books.learn(backend, model_runner)
        return result

    def after_scheduler_init(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.backends:
            logger.warning(
                "g4debug: page-table is armed, but this server has no trtllm_mha attention "
                "backend: there is nothing that it can check"
            )
        for limit in sorted(self.books.limits):
            logger.warning("g4debug: page-table checks ranges only: %s", limit)
        return result

    def after_page_table(
        self, table: torch.Tensor, backend: Any, layer: Any, forward_batch: Any
    ) -> torch.Tensor:
        """Check the table and return the one for the kernel (safe unless in log mode)."""
        pool, name = pool_of_layer(backend, layer, forward_batch)
        key = (id(backend), name)
        latest = self._latest.get(key)
        if latest is None or latest.table is not table or latest.layer is layer:
            latest = self._check(table, backend, layer, forward_batch, pool, name)
            self._latest[key] = latest
        return latest.out if self.contain else table

    def _check(
        self, table: torch.Tensor, backend: Any, layer: Any, batch: Any, pool: Any, name: str
    ) -> Launch:
        if self.trap is None:
            self.trap = TrapBuffer(table.device)
        key = (id(backend), name)
        captured = table.is_cuda and torch.cuda.is_current_stream_capturing()
        if captured:
            slot = self.trap.new_slot()
        else:
            slot = self._eager_slots.setdefault(key, 0) or self.trap.new_slot()
            self._eager_slots[key] = slot
        seq_lens, cu_q = trtllm_mha.lengths(backend)
        rows = table.shape[0]
        launch = Launch(
            backend=backend,
            layer=layer,
            batch=batch,
            table=table,
            seq_lens=seq_lens,
            cu_q=cu_q,
            out=self._buffer(key, table),
            pool_name=name,
            pages=pages_of(pool, layer, backend.page_size),
            window=trtllm_mha.window(layer, name),
            truth=self.books.truth(backend, batch, name, rows, captured),
            slot=slot,
            captured=captured,
        )
        self.launches[slot] = launch
        guard = page_guard.launch if table.is_cuda else page_guard.reference
        guard(
            table,
            launch.out,
            launch.seq_lens,
            launch.cu_q,
            self.trap,
            slot,
            launch.pages,
            int(backend.page_size),
            launch.window,
            launch.truth,
        )
        if not table.is_cuda:
            self.poll()
        return launch

    def _buffer(self, key: tuple[int, str], table: torch.Tensor) -> torch.Tensor:
        """Contiguous int32 scratch of the table's shape.

        One per backend and pool, grown when needed; a captured graph keeps pointing at the
        one it was captured with, so outgrown buffers are kept.
        """
        rows, columns = table.shape
        kept = self._buffers.setdefault(key, [])
        if not kept or kept[-1].numel() < rows * columns + SLACK:
            cells = rows * columns + SLACK
            kept.append(torch.zeros(cells, dtype=torch.int32, device=table.device))
        return kept[-1][: rows * columns].view(rows, columns)

    def after_run_batch(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self.poll()
        return result

    def before_stream_output(self, *args: Any, **kwargs: Any) -> None:
        # By now SGLang waited for the step's tokens, so the guard's writes of that forward
        # are visible: in raise mode no token of a void step leaves the process.
        self.poll()

    def poll(self) -> None:
        """Report what the guard saw. One read of host memory when it saw nothing."""
        if self.trap is None or self.lost or not self.trap.tripped:
            return
        recorder, found = self.context.recorder, []
        for slot in self.trap.tripped_slots() or [0]:
            launch, fields = self.launches.get(slot), self.trap.fields(slot)
            draft = launch is not None and id(launch.backend) in self.drafts
            try:
                found.append(describe(launch, fields, recorder, draft, self.context.ledger))
            except Exception:
                # Our bug must not swallow the finding: the kernel's table was safe, not right.
                logger.exception("g4debug: page-table finding could not be described in full")
                bare, _, _ = describe(None, fields, recorder, draft, None)
                found.append((bare, None, ()))
        self._clear()
        for finding, table, events in found:  # in raise mode the first one ends it
            self.context.trap.report(finding, Evidence(table=table, events=events))

    def _clear(self) -> None:
        assert self.trap is not None
        try:
            self.trap.clear()
        except RuntimeError as e:
            # The device is gone, and with it all that could still be checked.
            logger.error("g4debug: page-table: the device is lost (%s); no further checks", e)
            self.lost = True


def install(context: Context) -> None:
    PageTableTracer(context).install()


TRACER = Tracer(
    id="page-table",
    title="every live cell of a page table is the page that req_to_token and the allocators say",
    sites=(
        trtllm_mha.BUILT,
        trtllm_mha.HANDED_OVER,
        "scheduler.init",
        "scheduler.run_batch",
        "scheduler.run_event_loop",
        "scheduler.stream_output",
    ),
    install=install,
    ledger=True,
)
