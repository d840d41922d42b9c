"""What ``SGLANG_TRTLLM_MHA_DEBUG=watch`` arms of page-table: the guard without books.

It asks one thing of each live cell of a page table, and of each entry of a list of tokens: is it
inside the pool of its layer? That needs no ledger, no copy of the rows when a forward is launched,
and no hook at an allocator. A page of the pool that is another request's, free or stale is not
seen. A cell outside the pool is certainly wrong, whatever the server does, so nothing has to
confirm it.

In mode ``contain`` the kernel gets page 0 in its place: the answer is lost, and the server lives. A
word beside a list is only told, unless a kernel would leave its memory by it
(:mod:`g4debug.tracers.page_table.token_ranges`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from g4debug.sanitizer.backend_state import BackendState
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.page_table.token_check import Repair
from g4debug.tracers.page_table.tracer import PageTableTracer

if TYPE_CHECKING:
    import torch

    from g4debug.backends.base import Adapter
    from g4debug.backends.handed_over import TokenLists

WHY = (
    "SGLANG_TRTLLM_MHA_DEBUG=watch keeps no books of the pages, so a page that is another's, free "
    "or stale is not seen; =1 sees it"
)


class NoBooks(BackendState):
    """Backends of which nothing is known but the pools: only ranges can be checked."""

    def learn(self, backend: Any, model_runner: Any, page_size: int) -> None:
        self.known.add(id(backend))


class RangeGuard(PageTableTracer):
    """Page tables and lists of tokens, by their ranges."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.backends = NoBooks(None, self.snapshots)
        # Nothing is replaced but what would be read outside of the pool, and no word that would not
        # lead there: the lengths that it is compared with may be ours alone.
        self.repair, self.least = False, Repair.RANGES
        # By id() of a backend: a layer for its list with a window, and one for the other.
        self._layers: dict[int, dict[bool, Any]] = {}

    def install(self) -> None:
        super().install()
        self.context.status.limit("ranges only", WHY, quiet=True)  # the start-up line says watch

    def token_lists(
        self, adapter: Adapter, lists: TokenLists, backend: Any, layer: Any, batch: Any
    ) -> None:
        super().token_lists(adapter, lists, backend, layer, batch)
        layers = self._layers.setdefault(id(backend), {})
        if (lists.window >= 0) not in layers and self._checked(lists.indices, backend, layer):
            layers[lists.window >= 0] = layer

    def _checked(self, indices: torch.Tensor, backend: Any, layer: Any) -> bool:
        key = self._keys.get((id(backend), layer.layer_id))
        latest = None if key is None else self.latest.get(key)
        return latest is not None and latest.table is indices

    def layers_of(self, backend: Any) -> Sequence[Any]:
        """A layer for each list of this backend that was checked: one of each kind, and no books.

        So a list that is changed between its making and a layer is told in one prefill of some, in
        which each layer keeps its hook (:mod:`g4debug.backends.aside`).
        """
        return tuple(self._layers.get(id(backend), {}).values())

    def follow(self) -> None:
        """Only the sites at which what the kernel left is read: there is no copy to be made."""
        self.context.after("scheduler.run_batch", self.after_run_batch)
        self.context.before("scheduler.stream_output", self.before_stream_output)
        self.context.on_exception("scheduler.run_event_loop", self.poll)


WATCH = Tracer(
    id="page-table",
    title="each live cell of a page table, and each entry of a list, is inside the layer's pool",
    install=lambda context: RangeGuard(context).install(),
    each_forward=True,
)
