"""What the page-table faults share: where they act, on which cells, and what they log.

They act when the metadata of a forward is ready (``init_forward_metadata``, and its variant for the
replay of CUDA graphs), on the device tensor that the kernel will read. Under CUDA graphs the fault
appears only at replay, where no Python hook of the attention layer runs; a graph that fills in the
tables itself overwrites them again (``_in_graph.py``). Row and table (full or
SWA) are drawn at random. The column is the newest page's: it is inside every window, so it is
live in both kinds of layers. Padding rows stay as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from g4debug.faults._in_graph import Overwritten
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action, GrammarError
from g4debug.hooking import targets

if TYPE_CHECKING:
    import torch

    from g4debug.hooking.hooks import Hooks

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


class Corruption:
    """What one fault puts into a cell."""

    def see(self, of: Tables) -> None:
        """Look at the tables of a forward. It is called for each forward, before ``wrong``."""

    def wrong(self, cell: Cell, draw: random.Random) -> int | None:
        """The page number to put there; None if there is none that fits."""
        raise NotImplementedError


def cells_of(fault: str, action: Action) -> int:
    """How many cells an action corrupts. Raises GrammarError for an unusable argument."""
    text = action.argument or "1"
    if not text.isdecimal() or int(text) < 1:
        raise GrammarError(f"{fault}: corrupt({text}): expected a number of cells, at least 1")
    return int(text)


def tables_of(backend: Any, slots: list[int] | None, padding: list[bool] | None) -> Tables:
    """The tables of ``backend.forward_metadata``.

    slots: the row of req_to_token of each row, None if not known. padding: which rows are padding.
    """
    metadata = backend.forward_metadata
    lengths = [int(n) for n in metadata.cache_seqlens_int32.tolist()] if metadata else []
    tables = {}
    if metadata:
        both = {"full": metadata.page_table, "swa": metadata.swa_page_table}
        tables = {name: table for name, table in both.items() if table is not None}
    width = min((t.shape[1] for t in tables.values()), default=0)
    size = int(backend.page_size)
    return Tables(
        backend,
        tables,
        [
            i
            for i, n in enumerate(lengths)
            if n > 0 and not (slots and slots[i] == 0) and not (padding and padding[i])
        ],
        [min((n + size - 1) // size, width) for n in lengths],
    )


def corrupt(of: Tables, injection: Injection, mode: str, runner: str, fault: Corruption) -> None:
    """Overwrite live cells, if there are such cells and the chain fires.

    The selectors @mode= and @runner= are compared with ``mode`` and ``runner``.
    """
    cells = [
        Cell(of, name, row, of.columns[row] - 1, int(table[row, of.columns[row] - 1]))
        for name, table in of.tables.items()
        for row in of.rows
    ]
    able = [c for c in cells if fault.wrong(c, random.Random(0)) is not None]
    action = injection.fire(mode=mode, runner=runner) if able else None
    if action is None:
        return
    for _ in range(cells_of(injection.fault.id, action)):
        cell = injection.random.choice(able)
        value = fault.wrong(cell, injection.random)
        if value is None:  # no value fits any more, because another cell was corrupted before
            continue
        of.write(cell.name, cell.row, cell.column, value)
        at = f"{cell.name} table row {cell.row} column {cell.column}"
        injection.log(f"{runner} {mode}: {at} = {value}")


def install(hooks: Hooks, injection: Injection, fault: Corruption) -> None:
    """Put a fault in place."""
    from g4debug.hooking.hooks import Order

    for action in injection.chain.actions:
        cells_of(injection.fault.id, action)  # an unusable argument is an error at start
    draft_backends: set[int] = set()
    again = Overwritten() if targets.path("attn.trtllm_mha.metadata_in_graph") is not None else None

    def after_init(result: Any, backend: Any, model_runner: Any, *args: Any, **kw: Any) -> Any:
        if getattr(model_runner, "is_draft_worker", False):
            draft_backends.add(id(backend))
        return result

    def act(of: Tables, mode: str) -> None:
        fault.see(of)
        runner = "draft" if id(of.backend) in draft_backends else "target"
        corrupt(of, injection, mode, runner, fault)

    def after_metadata(result: Any, backend: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        of = tables_of(backend, batch.req_pool_indices.tolist(), None)
        act(of, batch.forward_mode.name.lower())
        return result

    def after_replay(result: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        of = replayed(backend, args, kwargs, again)
        if of is not None:
            act(of, "replay")
        return result

    def after_in_graph(result: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        assert again is not None
        again.fill_in(backend)
        return result

    owner = injection.fault.id
    hooks.after("attn.trtllm_mha.init", Order.FAULT, owner, after_init)
    hooks.after("attn.trtllm_mha.metadata", Order.FAULT, owner, after_metadata)
    hooks.after("attn.trtllm_mha.metadata_replay", Order.FAULT, owner, after_replay)
    if again is not None:
        hooks.after("attn.trtllm_mha.metadata_in_graph", Order.FAULT, owner, after_in_graph)


def replayed(
    backend: Any, args: tuple[Any, ...], kwargs: dict[str, Any], again: Overwritten | None
) -> Tables | None:
    """The static tables of a graph that is about to be replayed; None if it is being captured.

    Up to 0.5.12 the arguments are ``bs, req_pool_indices, seq_lens``, later a ForwardBatch.
    """
    if args and isinstance(args[0], int):
        slots, lengths = args[1], args[2]
    else:
        batch = args[0] if args else kwargs["forward_batch"]
        if kwargs.get("in_capture", args[1] if len(args) > 1 else False):
            if again is not None:
                again.forget(backend)
            return None
        slots, lengths = batch.req_pool_indices, batch.seq_lens
        if again is not None:
            again.before_replay(backend, batch)
    rows = len(backend.forward_metadata.cache_seqlens_int32)
    # Padding rows keep the rows of req_to_token of an earlier batch; only their length is reset.
    fill = backend.get_cuda_graph_seq_len_fill_value()
    padding = [int(n) <= fill for n in lengths.tolist()[:rows]]
    return replace(tables_of(backend, slots.tolist()[:rows], padding), again=again)


def declare(name: str, title: str, fresh: Callable[[], Corruption]) -> Fault:
    """Declare a page-table fault. ``fresh`` is called once for each process."""
    return Fault(
        id=name,
        title=title,
        tasks=TASKS,
        caught_by=("page-table",),
        install=lambda hooks, injection: install(hooks, injection, fresh()),
        arguments=("corrupt",),
        selectors=("mode", "runner"),
        drills=("1*on@runner=target@mode=target_verify", "1*on@runner=draft@mode=decode"),
    )
