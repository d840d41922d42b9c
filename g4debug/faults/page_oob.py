"""Puts an out-of-range page into a live cell of a page table.

Acts where the metadata of a forward is ready (``init_forward_metadata``, and the CUDA
graphs' replay variant), on the device tensor that the kernel will read: under CUDA graphs
the fault appears only at replay, where no Python hook of the attention layer runs.
The cell (row, live column) and the table (full or SWA) are drawn from the fault's seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Arm, Fault
from g4debug.faults.grammar import Action, GrammarError

if TYPE_CHECKING:
    from g4debug.hooks import Hooks

# Far beyond any pool: on a GPU the address must not fall into a neighbouring allocation.
FAR = 10_000_000


def cells_of(action: Action) -> int:
    """How many cells an action corrupts. Raises GrammarError if its argument is no such number."""
    text = action.argument or "1"
    if not text.isdecimal() or int(text) < 1:
        raise GrammarError(f"page-oob: corrupt({text}): expected a number of cells, from 1")
    return int(text)


def corrupt(backend: Any, arm: Arm, mode: str, runner: str) -> None:
    """Overwrite live cells of ``backend.forward_metadata``, if the chain fires.

    ``mode`` and ``runner`` are compared with the selectors @mode= and @runner=.
    """
    metadata = backend.forward_metadata
    lengths = [int(n) for n in metadata.cache_seqlens_int32.tolist()] if metadata else []
    rows = [i for i, n in enumerate(lengths) if n > 0]
    action = arm.fire(mode=mode, runner=runner) if rows else None
    if action is None:
        return
    tables = [
        (n, t)
        for n, t in (("full", metadata.page_table), ("swa", metadata.swa_page_table))
        if t is not None
    ]
    for _ in range(cells_of(action)):
        name, table = arm.random.choice(tables)
        row = arm.random.choice(rows)
        # The newest page: inside every sliding window, so live for both kinds of layer.
        pages = (lengths[row] + backend.page_size - 1) // backend.page_size
        column = min(pages, table.shape[1]) - 1
        value = FAR + arm.random.randrange(1000)
        table[row, column] = value
        arm.log(f"{runner} {mode}: {name} table row {row} column {column} = {value}")


def install(hooks: Hooks, arm: Arm) -> None:
    from g4debug.hooks import Layer

    for action in arm.chain.actions:
        cells_of(action)  # at start, not when it first fires
    draft_backends: set[int] = set()

    def after_init(result: Any, backend: Any, model_runner: Any, *args: Any, **kw: Any) -> Any:
        if getattr(model_runner, "is_draft_worker", False):
            draft_backends.add(id(backend))
        return result

    def runner(backend: Any) -> str:
        return "draft" if id(backend) in draft_backends else "target"

    def after_metadata(result: Any, backend: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        corrupt(backend, arm, batch.forward_mode.name.lower(), runner(backend))
        return result

    def after_replay(result: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        corrupt(backend, arm, "replay", runner(backend))
        return result

    owner = arm.fault.id
    hooks.after("attn.init", Layer.FAULT, owner, after_init)
    hooks.after("attn.metadata", Layer.FAULT, owner, after_metadata)
    hooks.after("attn.metadata_replay", Layer.FAULT, owner, after_replay)


FAULT = Fault(
    id="page-oob",
    title="a live cell of a page table gets an out-of-range page",
    tasks={
        "on": "corrupt one cell",
        "corrupt": "corrupt as many cells as the argument says",
    },
    caught_by=("page-table",),
    install=install,
    arguments=("corrupt",),
    selectors=("mode", "runner"),
)
