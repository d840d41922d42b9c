"""Turns what the page-table guard saw into a Finding. Runs only after it tripped."""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import suppress

import torch

from g4debug.findings.record import Finding, LayerKind, Location, PageEvent, Pool, Table
from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger
from g4debug.tracers.page_table.check import Kind, TableCheck, Truth, check_page_table
from g4debug.tracers.page_table.facts import NAMES, REFERENCES, Cell, Facts, event_line
from g4debug.tracers.page_table.launch import Launch

logger = logging.getLogger("g4debug")
# Kinds that depend on what is held now: by the time of the report a request may have ended.
_PASSING = (Kind.FREED, Kind.EVICTED)


def describe(
    launch: Launch | None,
    fields: dict[str, int],
    recorder: Recorder,
    draft: bool,
    ledger: Ledger | None,
) -> tuple[Finding, Table | None, tuple[PageEvent, ...]]:
    """The finding; the table around it, if the device can still be read; its page's events."""
    if launch is None:
        return _bare(fields, recorder), None, ()
    page_size = int(launch.backend.page_size)
    pool = Pool(
        launch.pool_name,
        launch.pages,
        page_size,
        (launch.pages - 1) * page_size,
        _used(recorder, launch.pool_name),
    )
    table, cell = None, _cell(fields)
    with suppress(RuntimeError):  # a dead CUDA context: what the kernel wrote is all there is
        table, cell = read_table(launch, pool, recorder, cell)
    _settle(ledger)
    rid = table.rids[cell.row] if table is not None and cell.row < len(table.rids) else ""
    facts = Facts(launch, cell, rid, ledger)
    events = facts.events()
    layer = int(launch.layer.layer_id)
    kind: LayerKind = "sliding" if launch.pool_name == "swa" else "full"
    who = "draft" if draft else "target"
    mode = launch.batch.forward_mode.name
    count = len(table.bad) if table is not None and len(table.bad) else fields["count"]
    finding = Finding(
        check="page-table",
        kind=facts.kind,
        site="attn.layer_page_table",
        headline=(
            f"g4debug: page-table in {who} {mode.lower().replace('_', '-')}: {kind} layer "
            f"{layer} {facts.what()} (request {rid or '?'}, row {cell.row}, column {cell.column})"
        ),
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=recorder.step,
            forward_mode=mode,
            runner=who,
            layer=layer,
            layer_kind=kind,
            request=rid,
            row=cell.row,
            column=cell.column,
            replay=launch.captured,
        ),
        expected=facts.expected(),
        got=facts.got(count),
        owner=facts.owner(),
        history=tuple(event_line(e) for e in events),
        cause=facts.cause(),
        reference=facts.fix() + REFERENCES[facts.kind],
        next_command=facts.next_command(),
    )
    return finding, table, events


def read_table(launch: Launch, pool: Pool, recorder: Recorder, seen: Cell) -> tuple[Table, Cell]:
    """Copy the guarded table to the host and check it again; the cell to report.

    That is the first one of the kind that the kernel saw, or what the kernel saw, if the table
    was changed since.
    """
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
    elif seen in cells:
        cell = next(c for c in cells if c.kind == seen.kind)
    else:
        cells = [seen, *(c for c in cells if (c.row, c.column) != (seen.row, seen.column))]
        cell = seen
    used = int(((lengths + pool.page_size - 1) // pool.page_size).max()) if rows else 0
    columns = min(values.shape[1], used + 2)  # what lies past every row's end says nothing
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


def _cell(fields: dict[str, int]) -> Cell:
    kind = Kind(fields["kind"])
    return Cell(fields["row"], fields["column"], fields["value"], kind, fields["expected"])


def _on_host(launch: Launch) -> Truth | None:
    """The launch's truth on the host, cut to the requests of its rows."""
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
        shadow=None if truth.shadow is None else truth.shadow.cpu(),
        mapping=None if truth.mapping is None else truth.mapping.cpu(),
    )


def _settle(ledger: Ledger | None) -> None:
    if ledger is None:
        return
    try:
        ledger.settle(wait=True)
    except RuntimeError as e:  # a dead CUDA context: the events up to now must do
        logger.warning("g4debug: page-table: the last allocator events are lost (%s)", e)


def _rids(launch: Launch, rows: int, recorder: Recorder) -> tuple[str, ...]:
    """Request of each row, by the request-pool index that the forward really used."""
    by_index = recorder.requests_by_pool_index()
    indices = launch.batch.req_pool_indices.tolist()[:rows]
    current = recorder.current
    live = len(current.rids) if current is not None else rows
    names = [by_index.get(int(i), "") if n < live else "" for n, i in enumerate(indices)]
    return tuple(names + [""] * (rows - len(names)))


def _used(recorder: Recorder, name: str) -> int:
    return next((p.used_tokens for p in recorder.pools() if p.name == name), -1)


def _bare(fields: dict[str, int], recorder: Recorder) -> Finding:
    """From the kernel's own words alone."""
    cell = _cell(fields)
    kind = NAMES[cell.kind]
    outside = cell.kind in (Kind.NEGATIVE, Kind.RANGE)
    what = "is out of range" if outside else f"is wrong ({kind})"
    return Finding(
        check="page-table",
        kind=kind,
        site="attn.layer_page_table",
        headline=(
            f"g4debug: page-table: page {cell.value} {what} (row {cell.row}, column {cell.column})"
        ),
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=recorder.step,
            row=cell.row,
            column=cell.column,
        ),
        expected=f"page {cell.expected}" if cell.expected > 0 else "a page of the layer's pool",
        got=str(cell.value),
        reference=REFERENCES[kind],
    )
