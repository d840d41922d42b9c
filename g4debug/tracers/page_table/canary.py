"""Proves that the page-table tracer works: it must catch faults in a small, invented table.

One fault writes a page that no pool has, another one a page of another request, and a third one a
token that no pool has into a list of tokens. The tracer, the guards, the trap, the faults and the
dump are the real ones. Only the backends, the pool and the batch are stand-ins. No SGLang is
needed, and no server is touched.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.backends import adapter
from g4debug.backends.handed_over import PageTable, TokenLists
from g4debug.backends.triton import Built
from g4debug.dumps import reading
from g4debug.faults import lists as token_lists
from g4debug.faults import page_alias, page_oob, tables, token_oob
from g4debug.faults.base import Injection
from g4debug.faults.grammar import Chain, parse
from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.page_table.tracer import PageTableTracer
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap, TrapError

FAULTS = (
    (page_oob.FAULT, page_oob.OutOfRange, "out-of-range"),
    (page_alias.FAULT, page_alias.Alias, "mismatch"),
)
PAGE_SIZE = 64
COLUMNS = 8
LENGTHS = (130, 1, 512)
PAGES = len(LENGTHS) * COLUMNS + 1


def fire(folder: Path, device: torch.device) -> str:
    """Fire the faults, expect the findings and dumps in ``folder``. Returns what was seen."""
    settings = Settings(debug=True, debug_dir=folder)
    recorder = Recorder(settings.steps)
    trap = Trap(settings, Describer(recorder))
    tracer = PageTableTracer(Context("page-table", Hooks(), settings, recorder, trap))
    seen = []
    for fault, corruption, kind in FAULTS:
        backend, layer, batch = _serving(device)
        tracer.after_backend_init(_ADAPTER, backend, _RUNNER)
        if _check(tracer, backend, layer, batch) is not None:
            raise CanaryError("a sound table was reported as broken")
        name = fault.id
        injection = Injection(fault, Chain(parse(f"{name}=1*on").chains[name], 0, name), 0)
        of = tables.tables_of(backend, None, None)
        tables.corrupt(of, injection, "decode", "target", corruption())
        if not injection.schedule:
            raise CanaryError(f"the fault {name} did not fire")
        error = _check(tracer, backend, layer, batch)
        if error is None:
            raise CanaryError(f"the fault {name} was not found")
        if error.finding.kind != kind:
            raise CanaryError(f"the fault {name} was found as {error.finding.kind}, not {kind}")
        seen.append(_read_back(error, backend))
    seen.append(_fire_list(tracer, device))
    return f"found {', '.join(seen)}; dumps read back"


def _fire_list(tracer: PageTableTracer, device: torch.device) -> str:
    """The same with the lists of tokens that the triton backend hands over."""
    of, layer, batch = _serving(device)
    table, triton = of.forward_metadata.page_table, adapter("triton")
    tokens = (table.long()[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).view(
        len(LENGTHS), -1
    )
    lengths = torch.tensor(LENGTHS, device=device)
    lists = TokenLists(
        torch.cat([row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]),
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        lengths,
    )
    backend = SimpleNamespace(
        req_to_token=of.req_to_token,
        page_size=PAGE_SIZE,
        forward_metadata=SimpleNamespace(g4debug_built=Built(batch.req_pool_indices)),
    )
    tracer.after_backend_init(triton, backend, _RUNNER)

    def check() -> TrapError | None:
        try:
            tracer.token_lists(triton, lists, backend, layer, batch)
            if lists.indices.is_cuda:
                torch.cuda.synchronize()
            tracer.poll()
        except TrapError as e:
            return e
        return None

    if check() is not None:
        raise CanaryError("sound lists of tokens were reported as broken")
    fault, name = token_oob.FAULT, token_oob.FAULT.id
    injection = Injection(fault, Chain(parse(f"{name}=1*on").chains[name], 0, name), 0)
    given = token_lists.lists_of(backend, {"full": (lists.indices, lists.indptr)}, [0, 1, 2])
    token_lists.corrupt(given, injection, "decode", "target", token_oob.OutOfRange())
    error = check()
    if error is None or error.finding.kind != "out-of-range":
        raise CanaryError(f"the fault {name} was not found, or as something else: {error}")
    if error.path is None or reading.read(error.path).table is None:
        raise CanaryError(f"the fault {name} was found, but not dumped: {error.problem}")
    where = error.finding.location
    return f"a token out of range at row {where.row}, token {where.column}"


# What the tracer reads of a ModelRunner.
_ADAPTER = adapter("trtllm_mha")
_RUNNER = SimpleNamespace(server_args=SimpleNamespace(disable_overlap_schedule=True))


def _serving(device: torch.device) -> tuple[Any, Any, Any]:
    """A backend with one sound table of three requests, a full layer, and a batch."""
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    table = torch.arange(1, PAGES, dtype=torch.int32, device=device).view(len(LENGTHS), COLUMNS)
    req_to_token = torch.zeros(len(LENGTHS) + 1, COLUMNS * PAGE_SIZE, dtype=torch.int32)
    req_to_token = req_to_token.to(device)
    req_to_token[1:, ::PAGE_SIZE] = table * PAGE_SIZE
    metadata = SimpleNamespace(
        cache_seqlens_int32=lengths,
        cu_seqlens_q=torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=device),
        page_table=table.clone(),
        swa_page_table=None,
    )
    pool = SimpleNamespace(k_buffer=[torch.zeros(PAGES * PAGE_SIZE, 1, device=device)])
    backend = SimpleNamespace(
        forward_metadata=metadata, page_size=PAGE_SIZE, req_to_token=req_to_token
    )
    batch = SimpleNamespace(
        token_to_kv_pool=pool,
        forward_mode=SimpleNamespace(name="DECODE"),
        req_pool_indices=torch.arange(1, len(LENGTHS) + 1, device=device),
    )
    return backend, SimpleNamespace(layer_id=0, sliding_window_size=-1), batch


def _check(tracer: PageTableTracer, backend: Any, layer: Any, batch: Any) -> TrapError | None:
    """Check one forward. Returns the trap's exception, or None."""
    try:
        metadata = backend.forward_metadata
        handed = PageTable(
            metadata.page_table, metadata.cache_seqlens_int32, metadata.cu_seqlens_q, -1
        )
        tracer.page_table(_ADAPTER, handed, backend, layer, batch)
        if backend.forward_metadata.page_table.is_cuda:
            torch.cuda.synchronize()
        tracer.poll()
    except TrapError as e:
        return e
    return None


def _read_back(error: TrapError, backend: Any) -> str:
    """Compare the finding and its dump with the table itself."""
    if error.path is None:
        raise CanaryError(f"it was found, but not dumped: {error.problem}")
    record = reading.read(error.path)
    if record.table is None or not len(record.table.bad):
        raise CanaryError("it was found, but the bad cell is not in the dump")
    row, column, value = (int(x) for x in record.table.bad[0])
    where = record.finding.location
    if (where.row, where.column) != (row, column):
        raise CanaryError(f"the headline names another cell than the dump: {error.finding}")
    right = 1 + row * COLUMNS + column
    if int(backend.forward_metadata.page_table[row, column]) != value or value == right:
        raise CanaryError(f"another cell than the bad one was found: {error.finding.headline}")
    return f"page {value} at row {row}, column {column}"
