"""One hand-over of a page table that the guard checked, and reading it back afterwards."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from g4debug.findings.record import IntArray, Pool, Table
from g4debug.findings.steps import Recorder
from g4debug.hooking.layer_pools import request_table
from g4debug.sanitizer.device_check import Checked
from g4debug.sanitizer.trap_buffer import CELLS, Left, Record
from g4debug.tracers.page_table.check import Kind, TableCheck, Truth, check_page_table

if TYPE_CHECKING:
    from g4debug.backends.base import Adapter
    from g4debug.backends.handed_over import TokenLists
    from g4debug.sanitizer.misplaced import Misplaced


@dataclass(slots=True, kw_only=True)
class CheckedTable(Checked):
    """One hand-over that the guard checked, with the tensors that are needed to check it again.

    table: of lists of tokens, their ``kv_indices``. pages: of the pool. seq_lens, cu_q, out: of a
    page table, see ``guard.checked``. lists: if it is no page table.
    """

    adapter: Adapter
    table: torch.Tensor
    pages: int
    window: int = -1
    seq_lens: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lists: TokenLists | None = None

    def is_for(self, table: torch.Tensor, layer: Any) -> bool:
        """True if this is the table that was checked, for another layer of the forward."""
        return self.table is table and self.layer is not layer

    def remembered(self) -> CheckedTable:
        """The same without its list, which is as long as the context of all rows together."""
        if self.lists is None:
            return self
        none = self.table.new_empty(0)
        return replace(self, table=none, lists=replace(self.lists, indices=none))

    @property
    def rows(self) -> torch.Tensor:
        """SGLang's ``req_to_token`` as it is now. On the device."""
        found: torch.Tensor = request_table(self.backend, self.batch)
        return found

    @property
    def req_pool_indices(self) -> torch.Tensor:
        """The row of ``req_to_token`` of each row. On the device."""
        if self.truth is not None:
            return self.truth.req_pool_indices
        indices = self.adapter.indices(self.backend, self.batch)
        return self.batch.req_pool_indices if indices is None else indices


@dataclass(frozen=True)
class Cell:
    """One bad cell. If the row is too short: column = its columns, value = the pages it needs.

    For an entry of a list of tokens, column, value and expected are the pages of ``position``,
    ``token`` and ``right``. For a word beside the lists they are as the guard left them.
    expected: the page that belongs there, -1 if not known. step, request, full: see
    ``trap_buffer.Record``. position, token, right: for an entry, its position in the request, the
    token in it and the token that belongs there, -1 if not known. foreign: only of a cell of the
    kind FOREIGN.
    """

    row: int
    column: int
    value: int
    kind: Kind
    expected: int
    step: int = -1
    request: int = -1
    full: int = -1
    position: int = -1
    token: int = -1
    right: int = -1
    foreign: Misplaced | None = None

    @property
    def place(self) -> tuple[int, int, int, Kind, int]:
        """The numbers by which the cell is found again in the table."""
        return self.row, self.column, self.value, self.kind, self.expected

    def full_page(self, page_size: int) -> int:
        return self.full


def read_table(
    checked: CheckedTable, pool: Pool, recorder: Recorder, seen: Cell
) -> tuple[Table, Cell]:
    """Copy the table to the host and check it again. Returns it, and the cell to report.

    ``seen`` is what the guard saw. If it is still in the table, the first bad cell of its kind is
    reported. If the table was changed since then, ``seen`` itself is.
    """
    assert checked.seq_lens is not None
    rows = checked.table.shape[0]
    q_lens = None if checked.cu_q is None else checked.cu_q.cpu().diff()
    values = checked.table.cpu().to(torch.int64)
    lengths = checked.seq_lens.cpu().to(torch.int64)
    again = check_page_table(
        values, lengths, pool.pages, pool.page_size, checked.window, q_lens, _on_host(checked)
    )
    cells = [c for c in _cells(again) if c.kind == seen.kind or not _passes(c.kind)]
    if seen.kind is Kind.SHORT:
        cell = seen
    elif seen.place in [c.place for c in cells]:
        cell = next(c for c in cells if c.kind == seen.kind)
    else:
        cells = [seen, *(c for c in cells if (c.row, c.column) != (seen.row, seen.column))]
        cell = seen
    used = int(((lengths + pool.page_size - 1) // pool.page_size).max()) if rows else 0
    columns = min(values.shape[1], used + 2)  # what lies behind the end of every row says nothing
    table = Table(
        values=values[:, :columns].numpy().copy(),
        seq_lens=lengths.numpy().copy(),
        first_live=again.first_live.numpy().copy(),
        bad=_triples([[c.row, c.column, c.value] for c in cells]),
        pool=pool,
        window=checked.window,
        q_len=int(q_lens.max()) if q_lens is not None and len(q_lens) else 1,
        rows_total=rows,
        columns_total=checked.table.shape[1],
        rids=_rids(checked, rows, recorder),
    )
    return table, replace(cell, foreign=seen.foreign)


def _triples(cells: list[list[int]]) -> IntArray:
    """int64 [n, 3]: row, column and value of each cell."""
    return np.array(cells, dtype=np.int64).reshape(-1, 3)


def _passes(kind: Kind) -> bool:
    """True if the kind depends on held pages: a request may have ended before the report."""
    return kind.record.right_place and not kind.record.suspicion


def _cells(again: TableCheck) -> list[Cell]:
    lists = (again.bad.tolist(), again.kinds.tolist(), again.expected.tolist())
    return [
        Cell(row, column, value, Kind(kind), expected)
        for (row, column, value), kind, expected in zip(*lists, strict=True)
    ]


def cell_of(record: Record, checked: CheckedTable | None = None) -> Cell:
    """The cell that a record of the guard describes. Does not fail, whatever the record holds."""
    kind = Kind(record.kind) if record.kind in set(Kind) else Kind.UNREADABLE
    cell = Cell(*record[:3], kind, *record[6:10])
    if checked is None or checked.lists is None or kind is Kind.UNREADABLE or kind.record.beside:
        return cell
    right, size = record.expected, checked.page_size
    position = first_listed(record.length, checked.window) + record.at
    return replace(
        cell,
        column=position // size,
        value=record.value // size,
        expected=right // size if right >= 0 else -1,
        position=position,
        token=record.value,
        right=right,
    )


def first_listed(tokens: int, window: int) -> int:
    """The position of the first token in the list of a row with so many tokens."""
    return max(tokens - window, 0) if window >= 0 else 0


def kept(checked: CheckedTable, pool: Pool, seen: Cell, left: Left, rid: str) -> Table | None:
    """The part of the bad row that the guard kept. The row itself may be overwritten by now.

    A list becomes a table with pages of one token: its columns are the positions of the tokens in
    their request. None for other words than its entries.
    """
    length, lists, queries = left.record.length, checked.lists, 1
    origin = 0 if seen.kind is Kind.SHORT else left.record.at // CELLS * CELLS
    if lists is None:
        if checked.cu_q is not None and checked.captured:
            queries = int(checked.cu_q[1])  # the same in each row of a captured graph
        begin, (rows, columns) = 0, checked.table.shape
        first = first_listed(length - queries, checked.window) // pool.page_size
        used = min(-(-length // pool.page_size), columns)
        bad = [] if seen.kind is Kind.SHORT else [[seen.row, seen.column, seen.value]]
    elif seen.position < 0:
        return None
    else:
        begin = first = first_listed(length, checked.window)
        rows, columns, used = lists.rows, length, length - first
        pool = replace(pool, pages=pool.pages * pool.page_size, page_size=1)
        bad = [[seen.row, seen.position, seen.token]]
    return Table(
        values=left.cells[:1, : max(used - origin, 0)].astype(np.int64),
        seq_lens=np.array([length], dtype=np.int64),
        first_live=np.array([first], dtype=np.int64),
        bad=_triples(bad),
        pool=pool,
        window=checked.window,
        q_len=queries,
        row0=seen.row,
        column0=begin + origin,
        rows_total=rows,
        columns_total=columns,
        rids=(rid,),
    )


def _on_host(checked: CheckedTable) -> Truth | None:
    """The truth of the check on the host, with only the requests of its rows."""
    truth = checked.truth
    if truth is None:
        return None
    requests = truth.req_to_token.shape[0]
    request = truth.req_pool_indices[: checked.table.shape[0]].to(torch.int64)
    taken = truth.req_to_token[request.clamp(0, requests - 1)].cpu()
    theirs = ((request > 0) & (request < requests)).cpu()
    return dataclasses.replace(
        truth,
        req_to_token=torch.cat([taken[:0].new_zeros(1, taken.shape[1]), taken]),
        req_pool_indices=torch.where(theirs, torch.arange(1, len(request) + 1), 0),
        owners=None if truth.owners is None else truth.owners.cpu(),
        protected=_protected(truth.protected, request),
        rows_of=request.cpu(),
        shadow=None if truth.shadow is None else truth.shadow.cpu(),
        mapping=None if truth.mapping is None else truth.mapping.cpu(),
    )


def _protected(protected: torch.Tensor | None, request: torch.Tensor) -> torch.Tensor | None:
    """``protected`` of these requests, behind one of row 0."""
    if protected is None:
        return None
    taken = protected[request.clamp(0, len(protected) - 1)].cpu()
    return torch.cat([taken.new_zeros(1), taken])


def _rids(checked: CheckedTable, rows: int, recorder: Recorder) -> tuple[str, ...]:
    """The request of each row, from the row of ``req_to_token`` that the forward used."""
    by_index = recorder.requests_by_pool_index()
    indices = checked.req_pool_indices.tolist()[:rows]
    current = recorder.current
    live = len(current.rids) if current is not None else rows
    names = [by_index.get(int(i), "") if n < live else "" for n, i in enumerate(indices)]
    return tuple(names + [""] * (rows - len(names)))
