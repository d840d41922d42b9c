"""What a finding is, and what a dump holds.

Plain frozen dataclasses: values and CPU tensors only, so that a dump opens with
``torch.load(weights_only=True)`` on a machine without SGLang or a GPU.

The order of the fields of :class:`Finding` is the report's (headline, location, expected and
got, owner and history, cause, next command), after the report order of Linux' KFENCE.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
