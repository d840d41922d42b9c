"""One hand-over of a page table that the guard checked, and reading it back afterwards."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from g4debug.findings.record import Pool, Table
from g4debug.findings.steps import Recorder
from g4debug.sanitizer.trap_buffer import CELLS, Left
from g4debug.tracers.page_table.check import Kind, TableCheck, Truth, check_page_table

if TYPE_CHECKING:
    from g4debug.backends.base import Adapter
    from g4debug.backends.handed_over import TokenLists

# Kinds that depend on what is held. Until the report is made, a request may have ended.
_PASSING = [k for k in Kind if k.record.right_place and not k.record.suspicion]


@dataclass(slots=True)
class Launch:
    """One hand-over that the guard checked, with the tensors that are needed to check it again."""

    adapter: Adapter
    backend: Any
    layer: Any
    batch: Any  # the ForwardBatch; in a captured CUDA graph, with static buffers
    table: torch.Tensor  # of lists of tokens: kv_indices
    pool_name: str  # "full" or "swa": the inner KV pool that the layer reads
    pages: int
    page_size: int
    truth: Truth | None
    slot: int
    captured: bool
    window: int = -1
    # Of a page table:
    seq_lens: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lists: TokenLists | None = None  # if it is no page table

    def is_for(self, table: torch.Tensor, layer: Any) -> bool:
        """True if this is the table that was checked, for another layer of the forward."""
        return self.table is table and self.layer is not layer

    def remembered(self) -> Launch:
        """The same without its list, which is as long as the context of all rows together."""
        if self.lists is None:
            return self
        none = self.table.new_empty(0)
        return replace(self, table=none, lists=replace(self.lists, indices=none))

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

    Of an entry of a list of tokens, column, value and expected are the pages in which ``position``,
    ``token`` and ``right`` lie. Of a word beside the entries (``kind.record.beside``) they are as
    the guard left them.
    """

    row: int
    column: int
    value: int
    kind: Kind
    expected: int  # the page that belongs there, -1 if not known
    # If it was compared with the copy of a launch: its step, the request's row of req_to_token, and
    # the full page that this row had for the cell. -1 if it was compared with the live tables.
    step: int = -1
    request: int = -1
    full: int = -1
    position: int = -1  # of the token in its request
    token: int = -1  # the entry
    right: int = -1  # the token that belongs there, -1 if not known

    @property
    def place(self) -> tuple[int, int, int, Kind, int]:
        """What can be found again in the table."""
        return self.row, self.column, self.value, self.kind, self.expected


def read_table(launch: Launch, pool: Pool, recorder: Recorder, seen: Cell) -> tuple[Table, Cell]:
    """Copy the table to the host and check it again. Returns it, and the cell to report.

    ``seen`` is what the guard saw. If it is still in the table, the first bad cell of its kind is
    reported. If the table was changed since then, ``seen`` itself is.
    """
    assert launch.seq_lens is not None
    rows = launch.table.shape[0]
    q_lens = None if launch.cu_q is None else launch.cu_q.cpu().diff()
    values = launch.table.cpu().to(torch.int64)
    lengths = launch.seq_lens.cpu().to(torch.int64)
    checked = check_page_table(
        values, lengths, pool.pages, pool.page_size, launch.window, q_lens, _on_host(launch)
    )
    cells = [c for c in _cells(checked) if c.kind == seen.kind or c.kind not in _PASSING]
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
        values=values[:, :columns].clone(),
        seq_lens=lengths,
        first_live=checked.first_live,
        bad=torch.tensor([[c.row, c.column, c.value] for c in cells], dtype=torch.int64).reshape(
            -1, 3
        ),
        pool=pool,
        window=launch.window,
        q_len=int(q_lens.max()) if q_lens is not None and len(q_lens) else 1,
        rows_total=rows,
        columns_total=launch.table.shape[1],
        rids=_rids(launch, rows, recorder),
    )
    return table, cell


def _cells(checked: TableCheck) -> list[Cell]:
    lists = (checked.bad.tolist(), checked.kinds.tolist(), checked.expected.tolist())
    return [
        Cell(row, column, value, Kind(kind), expected)
        for (row, column, value), kind, expected in zip(*lists, strict=True)
    ]


def cell_of(fields: dict[str, int], launch: Launch | None = None) -> Cell:
    """The cell that the guard left in a slot of the trap buffer, whatever is in there."""
    known = fields["kind"] in {int(kind) for kind in Kind}
    kind = Kind(fields["kind"]) if known else Kind.UNREADABLE
    words = ("row", "column", "value")
    row, column, value = (fields[word] for word in words)
    as_of = (fields["step"], fields["request"], fields["full"])
    whole = kind is Kind.UNREADABLE or bool(kind.record.beside)
    if launch is None or launch.lists is None or whole:
        return Cell(row, column, value, kind, fields["expected"], *as_of)
    right, size = fields["expected"], launch.page_size
    position = first_listed(fields["seq_len"], launch.window) + column
    return Cell(
        row,
        position // size,
        value // size,
        kind,
        right // size if right >= 0 else -1,
        *as_of,
        position=position,
        token=value,
        right=right,
    )


def first_listed(tokens: int, window: int) -> int:
    """The position of the first token in the list of a row with so many tokens."""
    return max(tokens - window, 0) if window >= 0 else 0


def rid_at(recorder: Recorder, cell: Cell) -> str:
    """The request that had the cell's row of ``req_to_token`` in its step. '' if not known."""
    for step in reversed(recorder.steps):
        if step.step == cell.step and cell.request in step.rows:
            return step.rids[step.rows.index(cell.request)]
    return ""


def kept_table(launch: Launch, pool: Pool, seen: Cell, left: Left, rid: str) -> tuple[Table, Cell]:
    """The part of the bad row that the guard kept. The table itself may be overwritten by now."""
    origin = 0 if seen.kind is Kind.SHORT else seen.column // CELLS * CELLS
    length = left.fields["seq_len"]
    used = min(-(-length // pool.page_size), launch.table.shape[1])
    values = torch.from_numpy(left.cells[:1, : max(used - origin, 0)].astype("int64"))
    queries = 1
    if launch.cu_q is not None and launch.captured:
        queries = int(launch.cu_q[1])  # the same in each row of a captured graph
    first = max(length - queries - launch.window, 0) // pool.page_size if launch.window >= 0 else 0
    bad = [] if seen.kind is Kind.SHORT else [[seen.row, seen.column, seen.value]]
    table = Table(
        values=values,
        seq_lens=torch.tensor([length]),
        first_live=torch.tensor([first]),
        bad=torch.tensor(bad, dtype=torch.int64).reshape(-1, 3),
        pool=pool,
        window=launch.window,
        q_len=queries,
        row0=seen.row,
        column0=origin,
        rows_total=launch.table.shape[0],
        columns_total=launch.table.shape[1],
        rids=(rid,),
    )
    return table, seen


def kept_list(launch: Launch, pool: Pool, seen: Cell, left: Left, rid: str) -> Table | None:
    """The part of the bad row's list that the guard kept: as a table with pages of one token.

    Its columns are the positions of the tokens in their request. None for other words than entries.
    """
    assert launch.lists is not None
    if seen.position < 0:
        return None
    length = left.fields["seq_len"]
    first = first_listed(length, launch.window)
    origin = left.fields["column"] // CELLS * CELLS
    values = torch.from_numpy(left.cells[:1, : max(length - first - origin, 0)].astype("int64"))
    return Table(
        values=values,
        seq_lens=torch.tensor([length]),
        first_live=torch.tensor([first]),
        bad=torch.tensor([[seen.row, seen.position, seen.token]]),
        pool=replace(pool, pages=pool.pages * pool.page_size, page_size=1),
        window=launch.window,
        row0=seen.row,
        column0=first + origin,
        rows_total=launch.lists.rows,
        columns_total=length,
        rids=(rid,),
    )


def _on_host(launch: Launch) -> Truth | None:
    """The truth of this launch, on the host, with the requests of its rows only."""
    truth = launch.truth
    if truth is None:
        return None
    requests = truth.req_to_token.shape[0]
    request = truth.req_pool_indices[: launch.table.shape[0]].to(torch.int64)
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


def _rids(launch: Launch, rows: int, recorder: Recorder) -> tuple[str, ...]:
    """The request of each row, from the row of ``req_to_token`` that the forward used."""
    by_index = recorder.requests_by_pool_index()
    indices = launch.req_pool_indices.tolist()[:rows]
    current = recorder.current
    live = len(current.rids) if current is not None else rows
    names = [by_index.get(int(i), "") if n < live else "" for n, i in enumerate(indices)]
    return tuple(names + [""] * (rows - len(names)))
