"""Lets a page-table fault last where a CUDA graph fills in the page tables itself.

From 0.5.15 on SGLang captures the kernel that writes the page tables, so a cell that is overwritten
before a replay is right again when attention reads it. So the captured graph gets one step more,
right after that kernel: where a second table, ours, has a page, it goes into SGLang's. Ours is
static, too, and is filled in from Python before each replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from g4debug.backends.base import TableAdapter

LEAVE: Final = -(1 << 31)  # of a cell that keeps SGLang's page; no fault writes it


class Overwritten:
    """One for each fault and adapter: its tables, by where SGLang's lie and by their shape."""

    def __init__(self, adapter: TableAdapter) -> None:
        self.adapter = adapter
        self._ours: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def of(self, table: torch.Tensor) -> torch.Tensor:
        """Ours for one of SGLang's static tables, int32, of the same shape."""
        key = table.data_ptr(), tuple(table.shape)
        if key not in self._ours:
            self._ours[key] = table.new_full(table.shape, LEAVE)
        return self._ours[key]

    def forget(self, backend: Any) -> None:
        """All cells keep SGLang's page. It makes our tables, so it comes before a capture, too."""
        for table in self._tables(backend):
            self.of(table).fill_(LEAVE)

    def fill_in(self, result: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        """Put our cells into the tables of ``backend.forward_metadata``; a graph can capture it."""
        for table in self._tables(backend):
            ours = self.of(table)
            table.copy_(ours.where(ours != LEAVE, table))
        return result

    def before_replay(self, backend: Any, batch: Any) -> None:
        """Forget the cells of the last replay, and fill in SGLang's tables as the graph will."""
        self.forget(backend)
        backend.init_forward_metadata_in_graph(batch)

    def _tables(self, backend: Any) -> list[torch.Tensor]:
        return list(self.adapter.tables_in(backend.forward_metadata).values())
