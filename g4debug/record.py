"""What a finding is, and what a dump holds.

Plain frozen dataclasses: values and CPU tensors only, so that a dump opens with
``torch.load(weights_only=True)`` on a machine without SGLang or a GPU.

The order of the fields of :class:`Finding` is the report's (headline, location, expected and
got, owner and history, cause, next command), after the report order of Linux' KFENCE.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

KIND = "g4debug-dump"
SCHEMA = 2  # 1 had no events, transitions and holdings; its dumps still open

Plain = str | int | float | bool | None
LayerKind = Literal["sliding", "full", ""]


@dataclass(frozen=True)
class Location:
    """Where a finding was made. Unknown numbers are -1, unknown texts ''."""

    process: str = ""  # "scheduler"
    pid: int = -1
    rank: int = -1  # tensor-parallel rank
    step: int = -1  # worker steps since the process started, from 1
    forward_mode: str = ""  # SGLang's ForwardMode name, e.g. DECODE, TARGET_VERIFY
    runner: str = ""  # "target" or "draft"
    layer: int = -1  # layer id in the KV pool that is read
    layer_kind: LayerKind = ""
    request: str = ""  # rid
    row: int = -1  # row of the table = position in the batch
    column: int = -1  # column of the table = page number within the request
    replay: bool = False  # found inside a CUDA-graph replay


@dataclass(frozen=True)
class Finding:
    """One violated invariant, in the words of the report."""

    check: str  # the tracer's name: "page-table"
    kind: str  # what is wrong: "out-of-range"
    site: str  # the logical hook site: "attn.layer_page_table"
    headline: str  # one line, starts with "g4debug: "
    location: Location
    expected: str
    got: str
    owner: str = ""  # who holds the page now, in words
    history: tuple[str, ...] = ()  # events of the page, oldest first
    cause: str = ""
    reference: str = ""  # the fix or the upstream thread that matches
    next_command: str = ""


@dataclass(frozen=True)
class Pool:
    """One KV pool. Sizes are in pages unless they say tokens.

    ``pages`` counts the reserved page 0: valid page indices are 0..pages-1.
    """

    name: str  # "full" or "swa"
    pages: int
    page_size: int  # tokens per page
    tokens: int  # allocatable tokens
    used_tokens: int = -1  # -1: not known

    @property
    def usage(self) -> float | None:
        """Used share of the allocatable tokens, 0..1, or None if not known."""
        if self.used_tokens < 0 or self.tokens <= 0:
            return None
        return self.used_tokens / self.tokens


@dataclass(frozen=True)
class Table:
    """A page table as the kernel would have got it (possibly a cut-out).

    values: int64 [rows, columns], page indices.
    seq_lens: int64 [rows], tokens whose KV the kernel may read.
    first_live: int64 [rows], first absolute column that a kernel may dereference
        (0 for a full layer, the window's first page for a sliding layer).
    bad: int64 [n, 3], (absolute row, absolute column, value) of the bad cells.
    row0/column0: absolute position of values[0, 0]; *_total: the whole table's shape.
    """

    values: torch.Tensor
    seq_lens: torch.Tensor
    first_live: torch.Tensor
    bad: torch.Tensor
    pool: Pool  # the pool that the layer reads from
    window: int = -1  # sliding window in tokens, -1: none
    q_len: int = 1  # query tokens per request
    row0: int = 0
    column0: int = 0
    rows_total: int = 0
    columns_total: int = 0
    rids: tuple[str, ...] = ()  # request of each row in `values`; "" for padding


@dataclass(frozen=True)
class Step:
    """One worker step, from host memory alone (the flight recorder's unit)."""

    step: int
    forward_mode: str
    rids: tuple[str, ...]
    seq_lens: tuple[int, ...]
    spec_info: str = ""  # type name of batch.spec_info when the step began
    full_used: int = -1  # tokens in use in the full pool
    swa_used: int = -1
    time_ns: int = -1  # Unix time when the step began
    waiting: int = -1  # requests in the queue
    rows: tuple[int, ...] = ()  # each request's row of req_to_token, -1 for none
    committed: tuple[int, ...] = ()  # tokens of the row that hold KV
    allocated: tuple[int, ...] = ()  # tokens of the row that have a slot
    evicted: tuple[int, ...] = ()  # SWA tokens given back from the front


@dataclass(frozen=True)
class PageEvent:
    """One event of an allocator: what happened to which pages, when, for whom, called by whom.

    ``pages`` is cut to the first few; ``count`` is how many there were. For an event of the
    page that a finding is about, that page is always among them.
    """

    step: int  # worker step that was the last to begin, 0 before the first
    kind: str  # "alloc", "extend", "decode", "free", "evict", "map", "unmap", "clear", "restore"
    pool: str  # "full" or "swa"
    pages: tuple[int, ...]
    count: int
    request: str = ""  # rid that the pages are for, or that held them
    caller: str = ""  # "schedule_batch.py:2744 _evict_swa"
    note: str = ""


@dataclass(frozen=True)
class Transition:
    """One hand-over of ``batch.spec_info``: the typestate before and after it."""

    step: int
    site: str  # "draft", "verify", "seed", "extend-after-decode", "merge", "filter", "end", ...
    before: str  # "idle", "draft-input", "verify-input", "draft-extend-input", or a type's name
    after: str
    requests: int = -1
    note: str = ""
    ok: bool = True  # False: the one that the finding is about


@dataclass(frozen=True)
class Holding:
    """Pages that somebody holds, or that nobody does: one line of a leak report."""

    pool: str
    pages: tuple[int, ...]  # the first few
    count: int
    state: str  # "leaked", "double", "free", "cached", "live"
    owner: str = ""  # rid of the last owner
    last: str = ""  # its last event, in words
    due: str = ""  # the event that should have freed it, in words
    step: int = -1  # step of that event


@dataclass(frozen=True)
class Evidence:
    """What goes into a dump beside the finding itself."""

    table: Table | None = None
    events: tuple[PageEvent, ...] = ()  # of the page that the finding is about, oldest first
    transitions: tuple[Transition, ...] = ()  # oldest first
    holdings: tuple[Holding, ...] = ()  # worst first


@dataclass(frozen=True)
class TrapRecord:
    """Everything a dump holds."""

    finding: Finding
    created: str  # ISO 8601, UTC
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)  # G4DEBUG_* and SGLANG_* switches
    geometry: dict[str, Plain] = field(default_factory=dict)  # model and pool sizes
    fixes: dict[str, str] = field(default_factory=dict)  # id -> "state: why"
    tracers: dict[str, str] = field(default_factory=dict)  # name -> "armed: mode"
    faults: tuple[str, ...] = ()  # firings, as a replayable schedule
    pools: tuple[Pool, ...] = ()
    table: Table | None = None
    steps: tuple[Step, ...] = ()  # oldest first
    events: tuple[PageEvent, ...] = ()  # of the page that the finding is about, oldest first
    transitions: tuple[Transition, ...] = ()  # of batch.spec_info, oldest first
    holdings: tuple[Holding, ...] = ()  # leaked pages and their owners, worst first
    allocator: tuple[PageEvent, ...] = ()  # the last events of all pages, oldest first
    schema: int = SCHEMA


def to_plain(record: TrapRecord) -> dict[str, Any]:
    """The record as nested dicts, lists, plain values and tensors.

    Subclasses of plain values become the plain value: ``torch.__version__`` is no ``str`` and
    ``ForwardMode.DECODE`` no ``int`` to a pickle, which would store an object, unreadable.
    """
    payload = {k: _exact(v) for k, v in dataclasses.asdict(record).items()}
    payload["kind"] = KIND
    return payload


def _exact(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    # The base class's own conversion: an Enum's str() is its name, not its value.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, dict):
        return {_exact(k): _exact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(v) for v in value]
    return value


def from_plain(payload: dict[str, Any]) -> TrapRecord:
    """The inverse of :func:`to_plain`.

    Raises ValueError, with the name of the field, where a value is missing or
    has the wrong type. Unknown fields are refused: a dump of this schema has none.
    """
    data = {k: v for k, v in payload.items() if k != "kind"}
    data["finding"] = _finding(data.get("finding"))
    for name, cls in _LISTS.items():
        data[name] = tuple(_build(cls, item, name) for item in _seq(data.get(name, ()), name))
    if data.get("table") is not None:
        table = dict(_mapping(data["table"], "table"))
        table["pool"] = _build(Pool, table.get("pool"), "table.pool")
        data["table"] = _build(Table, table, "table")
        _check_table(data["table"])
    record: TrapRecord = _build(TrapRecord, data, "dump")
    return record


_LISTS: dict[str, type] = {
    "pools": Pool,
    "steps": Step,
    "events": PageEvent,
    "transitions": Transition,
    "holdings": Holding,
    "allocator": PageEvent,
}


def _finding(value: Any) -> Finding:
    data = dict(_mapping(value, "finding"))
    data["location"] = _build(Location, data.get("location"), "finding.location")
    finding: Finding = _build(Finding, data, "finding")
    return finding


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a mapping, got {type(value).__name__}")
    return value


def _seq(value: Any, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where}: expected a list, got {type(value).__name__}")
    return list(value)


def _build(cls: Any, value: Any, where: str) -> Any:
    data = dict(_mapping(value, where))
    out: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name not in data:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ValueError(f"{where}.{f.name}: missing")
            continue
        out[f.name] = _coerce(str(f.type), data.pop(f.name), f"{where}.{f.name}")
    if data:
        raise ValueError(f"{where}: unknown field {sorted(map(str, data))[0]!r}")
    return cls(**out)


_SIMPLE: dict[str, type] = {"str": str, "int": int, "bool": bool, "LayerKind": str}


def _coerce(annotation: str, value: Any, where: str) -> Any:
    """Check a value against the few annotations that this module uses."""
    ok = True
    if annotation in _SIMPLE:
        expected = _SIMPLE[annotation]
        ok = isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
    elif annotation == "torch.Tensor":
        ok = isinstance(value, torch.Tensor)
    elif annotation.startswith("tuple[str"):
        value = tuple(_seq(value, where))
        ok = all(isinstance(v, str) for v in value)
    elif annotation.startswith("tuple[int"):
        value = tuple(_seq(value, where))
        ok = all(isinstance(v, int) for v in value)
    elif annotation.startswith("dict["):
        kinds = (str,) if annotation == "dict[str, str]" else (str, int, float, bool, type(None))
        items = _mapping(value, where).items()
        ok = all(isinstance(k, str) and isinstance(v, kinds) for k, v in items)
    if not ok:
        raise ValueError(f"{where}: expected {annotation}, got {type(value).__name__}")
    return value


def _check_table(table: Table) -> None:
    rows = table.values.shape[0] if table.values.dim() == 2 else -1
    for name, tensor, dim in (
        ("values", table.values, 2),
        ("seq_lens", table.seq_lens, 1),
        ("first_live", table.first_live, 1),
        ("bad", table.bad, 2),
    ):
        if tensor.dim() != dim or tensor.dtype != torch.int64 or tensor.is_sparse:
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise ValueError(f"table.{name}: expected int64 with {dim} dimensions, got {got}")
        if tensor.device.type != "cpu":
            raise ValueError(f"table.{name}: expected a CPU tensor, got {tensor.device}")
    if table.seq_lens.shape[0] != rows or table.first_live.shape[0] != rows:
        raise ValueError("table: seq_lens and first_live must have one entry per row")
    if table.bad.shape[1] != 3:
        raise ValueError("table.bad: expected three columns (row, column, value)")
    if table.rids and len(table.rids) != rows:
        raise ValueError("table.rids: must be empty or have one entry per row")
    if table.pool.page_size <= 0 or table.pool.pages < 0:
        raise ValueError("table.pool: page_size must be positive, pages not negative")
