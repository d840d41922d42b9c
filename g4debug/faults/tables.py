"""Shared by the page-table faults: where they act, on which cells, and what they log.

They act on the device tensors that the kernel will read, once SGLang has made them
(``_metadata.py``). A CUDA graph that fills in the tables itself overwrites them again
(``_in_graph.py``). Row and table (full or SWA) are drawn at random. The column is the newest
page's: it is inside every window, so it is live in both kinds of layers. Padding rows stay as they
are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from g4debug.backends import carrying
from g4debug.backends.base import TableAdapter
from g4debug.faults._in_graph import Overwritten
from g4debug.faults._metadata import Made, watch
from g4debug.faults.base import Asked, Fault, Injection, Install

if TYPE_CHECKING:
    import torch

TASKS = {"on": "corrupt one cell", "corrupt": "corrupt as many cells as the argument says"}


@dataclass(frozen=True)
class Tables:
    """The page tables of one forward.

    tables: "full", and "swa" if there is such a table. rows: the rows that belong to requests.
    columns: how many live columns each row has. again: of tables that a graph fills in itself, what
    it puts into them afterwards.
    """

    backend: Any
    tables: dict[str, torch.Tensor]
    rows: list[int]
    columns: list[int]
    again: Overwritten | None = None

    def write(self, name: str, row: int, column: int, value: int) -> None:
        table = self.tables[name]
        table[row, column] = value
        if self.again is not None:
            self.again.of(table)[row, column] = value


@dataclass(frozen=True)
class Cell:
    """The live cell with the newest page of its row."""

    of: Tables
    name: str
    row: int
    column: int
    value: int


# The page number that a fault puts into a cell; None if none fits. It is asked in each forward, of
# each cell that may be chosen.
Corruption = Callable[[Cell, random.Random], int | None]


def tables_of(
    adapter: TableAdapter,
    backend: Any,
    batch: Any,
    live: list[int] | None,
    again: Overwritten | None = None,
) -> Tables:
    """The tables of a forward, just made. live: the rows of requests, None for all."""
    metadata = adapter.made(backend, batch)
    if metadata is None:
        return Tables(backend, {}, [], [])
    tables, lengths = adapter.tables_in(metadata), adapter.lengths_in(metadata, batch).tolist()
    width = min((t.shape[1] for t in tables.values()), default=0)
    size = adapter.page_size(backend, None)
    rows = [i for i, n in enumerate(lengths) if n > 0 and (live is None or i in live)]
    columns = [min((n + size - 1) // size, width) for n in lengths]
    return Tables(backend, tables, rows, columns, again)


def corrupt(of: Tables, injection: Injection, mode: str, runner: str, fault: Corruption) -> None:
    """Overwrite live cells, if there are such cells and the chain fires.

    The selectors @mode= and @runner= are compared with ``mode`` and ``runner``.
    """
    cells = [
        Cell(of, name, row, of.columns[row] - 1, int(table[row, of.columns[row] - 1]))
        for name, table in of.tables.items()
        for row in of.rows
    ]
    able = [c for c in cells if fault(c, random.Random(0)) is not None]
    action = injection.fire(mode=mode, runner=runner) if able else None
    if action is None:
        return
    for _ in range(injection.fault.number_of(action)):
        cell = injection.random.choice(able)
        value = fault(cell, injection.random)
        if value is None:  # no value fits any more, because another cell was corrupted before
            continue
        of.write(cell.name, cell.row, cell.column, value)
        at = f"{cell.name} table row {cell.row} column {cell.column}"
        injection.log(f"{runner} {mode}: {at} = {value}")


def _install(fault: Corruption | type[Corruption], injection: Injection) -> None:
    """Put a fault in place, on every backend that hands over page tables."""
    corruption = fault() if isinstance(fault, type) else fault
    filling = [a for a in carrying(TableAdapter) if a.in_graph]
    overwritten = {adapter: Overwritten(adapter) for adapter in filling}

    @watch(injection, TableAdapter)
    def act(made: Made) -> None:
        again = None if made.static is None else overwritten.get(made.adapter)
        if made.mode == "capture":
            if again is not None:
                again.forget(made.backend)
            return
        if again is not None:
            again.before_replay(made.backend, made.batch)
        of = tables_of(made.adapter, made.backend, made.batch, made.live, again)
        corrupt(of, injection, made.mode, made.runner, corruption)

    for adapter, again in overwritten.items():
        injection.after(adapter.in_graph)(again.fill_in)


def declare(
    name: str,
    title: str,
    fault: Corruption | type[Corruption],
    asks: tuple[Asked, ...] = (),
    watched: str = "",
) -> tuple[Fault, Install]:
    """Declare a page-table fault: its FAULT and its install, which calls a class once."""
    declared = Fault(
        id=name,
        title=title,
        tasks=TASKS,
        caught_by=("page-table",),
        watched=watched,
        asks=("page tables", *asks),
        arguments=("corrupt",),
        counts="a number of cells",
        selectors=("mode", "runner"),
        drills=("1*on@runner=target@mode=target_verify", "1*on@runner=draft@mode=decode"),
    )
    return declared, partial(_install, fault)
