"""Proves that the page-table tracer works: it must catch faults in the hand-overs of a backend.

For each adapter the faults depend on the shape of its hand-over: in a page table a page that no
pool has, and a page of another request; in a list of tokens a token that no pool has. The tracer,
the adapters, the guards, the trap, the faults and the dump are the real ones. Only the backend, the
pool and the batch are stand-ins. No SGLang is needed, and no server is touched.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.backends import adapters
from g4debug.backends.base import Adapter, TableAdapter
from g4debug.backends.handed_over import PageTable, TokenLists
from g4debug.faults import lists, page_alias, page_oob, tables, token_oob
from g4debug.faults.base import Fault
from g4debug.sanitizer.canary import caught
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.page_table.tracer import PageTableTracer

FAULTS = (
    (page_oob.FAULT, page_oob.out_of_range, "out-of-range"),
    (page_alias.FAULT, page_alias.alias, "mismatch"),
)
PAGE_SIZE = 64
COLUMNS = 8
LENGTHS = (130, 1, 512)
ROWS = list(range(len(LENGTHS)))
PAGES = len(LENGTHS) * COLUMNS + 1
_LAYER = SimpleNamespace(layer_id=0, sliding_window_size=-1)
# What the tracer reads of a ModelRunner.
_RUNNER = SimpleNamespace(server_args=SimpleNamespace(disable_overlap_schedule=True))


def fire(folder: Path, device: torch.device) -> str:
    """Fire the faults, expect the findings and dumps in ``folder``. Returns what was seen."""
    # What is proven is the guard, also for a backend that was not run on this release or GPU.
    # Each fault leaves a dump, and there are more of them than a process of a server may write.
    dumps = len(adapters()) + len(FAULTS)
    settings = Settings(debug=True, debug_dir=folder, not_run_on_this_release=True, max_dumps=dumps)
    tracer = PageTableTracer(Context.alone("page-table", settings))
    tracer.before_run_batch()
    seen: list[str] = []
    for adapter in adapters():
        if isinstance(adapter, TableAdapter):
            # The others need not prove the rules again, and the dumps of a process are counted.
            faults = FAULTS[:1] if seen else FAULTS
            seen += [_fire_page(tracer, adapter, device, *each) for each in faults]
        else:
            seen.append(_fire_token(tracer, adapter, device))
    return f"found {', '.join(seen)}; dumps read back"


def _fire_page(
    tracer: PageTableTracer,
    adapter: Adapter,
    device: torch.device,
    fault: Fault,
    corruption: tables.Corruption,
    kind: str,
) -> str:
    backend, batch, table = _serving(tracer, adapter, device)
    cu_q = torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=device)
    handed = PageTable(table, batch.seq_lens, cu_q, -1)
    of = tables.Tables(backend, {"full": table}, ROWS, [-(-n // PAGE_SIZE) for n in LENGTHS])
    record = caught(
        tracer,
        lambda: tracer.page_table(adapter, handed, backend, _LAYER, batch),
        lambda injection: tables.corrupt(of, injection, "decode", "target", corruption),
        fault,
        kind,
    )
    if record.table is None or not len(record.table.bad):
        raise CanaryError("it was found, but the bad cell is not in the dump")
    row, column, value = (int(x) for x in record.table.bad[0])
    where = record.finding.location
    if (where.row, where.column) != (row, column):
        raise CanaryError(f"the headline names another cell than the dump: {record.finding}")
    right = 1 + row * COLUMNS + column
    if int(table[row, column]) != value or value == right:
        raise CanaryError(f"another cell than the bad one was found: {record.finding.headline}")
    return f"page {value} at row {row}, column {column}"


def _fire_token(tracer: PageTableTracer, adapter: Adapter, device: torch.device) -> str:
    backend, batch, table = _serving(tracer, adapter, device)
    tokens = table.long()[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)
    handed = TokenLists(
        torch.cat([row[:n] for row, n in zip(tokens.flatten(1), LENGTHS, strict=True)]),
        torch.nn.functional.pad(batch.seq_lens.cumsum(0), (1, 0)).to(torch.int32),
        batch.seq_lens,
    )
    of = lists.lists_of(backend, {"full": (handed.indices, handed.indptr)}, ROWS)
    record = caught(
        tracer,
        lambda: tracer.token_lists(adapter, handed, backend, _LAYER, batch),
        lambda injection: lists.corrupt(of, injection, "decode", "target", token_oob.out_of_range),
        token_oob.FAULT,
        "out-of-range",
    )
    if record.table is None:
        raise CanaryError("it was found, but the list is not in the dump")
    where = record.finding.location
    return f"a token out of range at row {where.row}, token {where.column}"


def _serving(
    tracer: PageTableTracer, adapter: Adapter, device: torch.device
) -> tuple[Any, Any, torch.Tensor]:
    """A backend, a batch of three requests, and their sound page table."""
    table = torch.arange(1, PAGES, dtype=torch.int32, device=device).view(len(LENGTHS), COLUMNS)
    req_to_token = torch.zeros(
        len(LENGTHS) + 1, COLUMNS * PAGE_SIZE, dtype=torch.int32, device=device
    )
    req_to_token[1:, ::PAGE_SIZE] = table * PAGE_SIZE
    backend = SimpleNamespace(
        forward_metadata=SimpleNamespace(),
        page_size=PAGE_SIZE,
        req_to_token=req_to_token,
        sliding_window_size=None,
    )
    batch = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(
            k_buffer=[torch.zeros(PAGES * PAGE_SIZE, 1, device=device)]
        ),
        forward_mode=SimpleNamespace(
            name="DECODE", is_decode_or_idle=lambda: True, is_target_verify=lambda: False
        ),
        spec_info=None,
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        req_pool_indices=torch.arange(1, len(LENGTHS) + 1, device=device),
    )
    tracer.after_backend_init(adapter, backend, _RUNNER)
    adapter.note(backend, batch, captured=False)
    return backend, batch, table
