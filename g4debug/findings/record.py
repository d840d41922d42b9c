"""The classes of a finding and of the content of a dump.

These are frozen dataclasses of plain values and numpy arrays, so that a dump opens on a machine
without SGLang, torch or a GPU. ``torch.load(weights_only=True)`` opens it, too.

The fields of :class:`Finding` stand in the order in which the report prints them (headline,
location, expected, got, owner, history, cause, next command), which follows the reports of
Linux' KFENCE.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from g4debug.findings.memory_map import MemoryMap
from g4debug.findings.status import TracerStatus

KIND = "g4debug-dump"
# 1 had no events, transitions and holdings; 1 and 2 had no host, dp and pp rank, no arguments, and
# only a mode for each tracer; 3 had no tape, no memory map, no autopsy, and did not tell a tracer
# that judges nothing. Their dumps still open.
SCHEMA = 4

Plain = str | int | float | bool | None
LayerKind = Literal["sliding", "full", ""]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Location:
    """Where a finding was made. An unknown number is -1, an unknown text is ''."""

    process: str = ""  # "scheduler"
    pid: int = -1
    host: str = ""  # the machine's name for itself; in a container, the container's
    rank: int = -1  # tensor-parallel rank
    dp_rank: int = -1  # data-parallel rank, of DP attention too
    pp_rank: int = -1  # pipeline-parallel rank
    step: int = -1  # worker steps since the process started, from 1
    forward_mode: str = ""  # SGLang's ForwardMode name, e.g. DECODE, TARGET_VERIFY
    runner: str = ""  # "target" or "draft"
    layer: int = -1  # layer id in the KV pool that is read
    layer_kind: LayerKind = ""
    request: str = ""  # rid
    row: int = -1  # row of the page table, which is the position in the batch
    column: int = -1  # column of the page table: the n-th page of the request
    replay: bool = False  # found inside a CUDA-graph replay


@dataclass(frozen=True)
class Finding:
    """A violation in the words of the report."""

    check: str  # the tracer's name: "page-table"
    kind: str  # what is wrong: "out-of-range"
    site: str  # the hook site: "attn.trtllm_mha.layer_page_table"
    headline: str  # one line, starts with "g4debug: "
    location: Location
    expected: str
    got: str
    owner: str = ""  # who holds the page now, in words
    history: tuple[str, ...] = ()  # events of the page, oldest first
    cause: str = ""
    reference: str = ""  # the entry of TRIAGE.md, and the fix that matches, if there is one
    next_command: str = ""


@dataclass(frozen=True)
class Pool:
    """One KV pool. Sizes are in pages, unless a name says tokens.

    ``pages`` includes the reserved page 0, so valid page indices are 0..pages-1.
    """

    name: str  # "full" or "swa"
    pages: int
    page_size: int  # tokens per page
    tokens: int  # allocatable tokens
    used_tokens: int = -1  # -1 if not known

    @property
    def usage(self) -> float | None:
        """The used share of the allocatable tokens, from 0 to 1. None if not known."""
        if self.used_tokens < 0 or self.tokens <= 0:
            return None
        return self.used_tokens / self.tokens


@dataclass(frozen=True)
class Table:
    """A page table as the kernel would have got it, or a part of that table.

    values: int64 [rows, columns], page indices.
    seq_lens: int64 [rows], for how many tokens of each row the kernel may read KV.
    first_live: int64 [rows], the first column, counted in the whole table, that a kernel may read
        (0 for a full layer, the window's first page for a sliding layer).
    bad: int64 [n, 3], (row, column, value) of each bad cell, counted in the whole table.
    row0, column0: the position of values[0, 0] in the whole table.
    rows_total, columns_total: the shape of the whole table.
    """

    values: IntArray
    seq_lens: IntArray
    first_live: IntArray
    bad: IntArray
    pool: Pool  # the pool that the layer reads from
    window: int = -1  # sliding window in tokens, -1 for none
    q_len: int = 1  # query tokens per request
    row0: int = 0
    column0: int = 0
    rows_total: int = 0
    columns_total: int = 0
    rids: tuple[str, ...] = ()  # the request of each row in `values`, "" for none, or not known


@dataclass(frozen=True)
class Tape:
    """What the scheduler was given up to now, see :mod:`g4debug.findings.tape`.

    events: int64 [n], the bytes of the tape, eight in each number, the first in the lowest bits.
    chunks: where in these bytes a chunk begins, from the oldest to the newest.
    """

    format: int
    page: int  # tokens of a page
    firsts: bool  # whether the first token of each page has a hash of its own
    begins: str  # why the tape may begin where it does: "start", "flush", "idle" or "busy"
    first: int  # the number of steps before it
    steps: int
    requests: int
    size: int  # bytes
    events: IntArray
    chunks: tuple[int, ...]
    # What decides with the requests: sizes and rules of the scheduler, by SGLang's names.
    scheduler: dict[str, Plain]
    limits: tuple[str, ...] = ()  # what happened that cannot be on a tape
    # For each limit, how many steps were before it came last; -1: it lasts, whatever is cut off.
    limits_at: tuple[int, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)  # of SGLang: ``findings/decisive.py``
    ended: tuple[str, ...] = ()  # limits that it had until it began anew where it begins


@dataclass(frozen=True)
class Step:
    """One step of the scheduler, as far as host memory tells."""

    step: int
    forward_mode: str
    rids: tuple[str, ...]
    seq_lens: tuple[int, ...]
    spec_info: str = ""  # type name of batch.spec_info when the step began
    full_used: int = -1  # tokens in use in the full pool
    swa_used: int = -1
    time_ns: int = -1  # Unix time when the step began
    waiting: int = -1  # requests in the waiting queue
    rows: tuple[int, ...] = ()  # each request's row of req_to_token, -1 for none
    committed: tuple[int, ...] = ()  # tokens of the row that hold KV
    allocated: tuple[int, ...] = ()  # tokens of the row that have a KV slot
    evicted: tuple[int, ...] = ()  # tokens from the row's beginning whose SWA pages were evicted


@dataclass(frozen=True)
class RequestEvent:
    """One event in the life of a request. A number that is not known, or that it lacks, is -1.

    A chunk is a part of its tokens that one step computes; what lies before its first chunk was
    found in the prefix cache. "waits" and "runs" say where it was when the dump was made.
    """

    step: int  # as of a PageEvent
    time_ns: int  # Unix time
    request: str  # rid; of an "abort" the beginning of those that are meant, '' for all
    kind: str  # "arrives", "chunk", "retracted", "abort", "ends", "waits" or "runs"
    begin: int = -1  # of a chunk: its first token
    end: int = -1  # of a chunk: the token behind its last one
    tokens: int = -1  # of prompt and output together
    output: int = -1  # tokens that it has got
    longest: int = -1  # of an arrival: max_new_tokens
    number: int = -1  # of an arrival: which request of this process it is, from 1, as on the tape
    allocated: int = -1  # tokens of its row that have a KV slot; of an end, just before
    evicted: int = -1  # tokens from the row's beginning whose SWA pages were evicted
    note: str = ""  # how it ended, or where it waits


@dataclass(frozen=True, slots=True)
class PageEvent:
    """One event of an allocator: what happened to which pages, when, for whom, and who called.

    ``pages`` has only the first few pages; ``count`` says how many there were. If a finding is
    about one page, the events of that page have it in ``pages`` in any case.
    """

    step: int  # the step that was being prepared or that had begun last, 0 before the first
    kind: str  # "alloc", "extend", "decode", "free", "evict", "map", "unmap", "clear", "restore"
    pool: str  # "full" or "swa"
    pages: tuple[int, ...]
    count: int
    request: str = ""  # rid of the request that gets the pages, or that had them
    caller: str = ""  # "schedule_batch.py:2744 _evict_swa"
    note: str = ""
    stopped: bool = False  # a free that g4debug prevented: the allocator did not get the pages

    def __init__(
        self,
        step: int,
        kind: str,
        pool: str,
        pages: tuple[int, ...],
        count: int,
        request: str = "",
        caller: str = "",
        note: str = "",
        stopped: bool = False,
    ) -> None:
        # An event is made in each allocation. The __init__ that a frozen dataclass gets takes
        # twice as long.
        _step(self, step)
        _kind(self, kind)
        _pool(self, pool)
        _pages(self, pages)
        _count(self, count)
        _request(self, request)
        _caller(self, caller)
        _note(self, note)
        _stopped(self, stopped)


# What sets each field of a new PageEvent.
_step, _kind, _pool, _pages, _count, _request, _caller, _note, _stopped = (
    vars(PageEvent)[f.name].__set__ for f in fields(PageEvent)
)


@dataclass(frozen=True)
class Transition:
    """One hand-over of ``batch.spec_info``: the state of spec_info before and after it."""

    step: int
    site: str  # "draft", "verify", "seed", "extend-after-decode", "merge", "filter", "end", ...
    before: str  # "idle", "draft-input", "verify-input", "draft-extend-input", or a type's name
    after: str
    requests: int = -1
    note: str = ""
    ok: bool = True  # False: the finding is about this hand-over


@dataclass(frozen=True)
class Holding:
    """Pages with the same last owner: one line of a leak report."""

    pool: str
    pages: tuple[int, ...]  # the first few
    count: int
    state: str  # what is wrong with them: the kind of finding, for example "leaked"
    owner: str = ""  # rid of the last owner
    last: str = ""  # the last event of the first page, in words
    due: str = ""  # what should have freed the pages, in words
    step: int = -1  # the step in which that should have happened


@dataclass(frozen=True)
class Held:
    """The pages that were handed out for a request and not freed, as the page ledger has it.

    runs: first and last page of each run of numbers, in one row, ascending. count: pages; more than
    the runs have, if not all had room.
    """

    pool: str
    request: str  # rid
    runs: tuple[int, ...]
    count: int

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(first, last) of each run."""
        return tuple(zip(self.runs[::2], self.runs[1::2], strict=False))

    @property
    def is_cut(self) -> bool:
        """True if the runs have not all of the pages."""
        return sum(last - first + 1 for first, last in self.pairs) < self.count

    def has(self, page: int) -> bool:
        return any(first <= page <= last for first, last in self.pairs)


@dataclass(frozen=True)
class DeviceAssert:
    """An assertion that failed in a kernel, as CUDA printed it. Equal ones are one, and counted."""

    expression: str  # "srcIndex < srcSelectDimSize"
    file: str  # "native/cuda/Indexing.cu", 'unknown' for a kernel that Triton made
    line: int
    function: str = ""  # the kernel, as far as CUDA names it: "indexSelectLargeIndex"
    block: str = ""  # of the first that printed it: "3,0,0"
    thread: str = ""
    count: int = 1  # how many threads printed it


@dataclass(frozen=True)
class Lookup:
    """A lookup of SGLang's: what indexes which table, and whether that index was out of range.

    low, high: the smallest and the largest index that is known; not known if high < low. exact:
    the host made these indices and sent them to the device in a step that the device may not have
    finished. Otherwise the device made them, and they are within low and high only if nothing is
    wrong.
    """

    name: str  # "the draft's token embedding"
    place: str  # SGLang's file: "models/gemma4_mtp.py"
    indices: str  # what indexes it: "token ids"
    sorts: tuple[str, ...] = ()  # how it is looked up, see flight_recorder/asserts.py
    rows: int = -1  # of the table, in this process; -1 if not known
    low: int = 0
    high: int = -1
    exact: bool = False
    never: str = ""  # why no index can be out of range, whatever it is; '' if it can
    note: str = ""  # what else is known of the table or of its indices
    verdict: str = ""  # "cannot", "could" or "not known"
    why: str = ""


@dataclass(frozen=True)
class Autopsy:
    """What a CUDA core dump says of the crash, see :mod:`g4debug.autopsy`. Unknown: '' or -1.

    The sentences are for a reader; the other fields are what they were made of.
    """

    core: str  # the file's name
    verdict: str  # one sentence: which page of which buffer, or that it was none
    exception: str = ""  # "CUDA_EXCEPTION_14: warp illegal address"
    kernel: str = ""  # demangled
    line: str = ""  # "decode_attention.py:353", where the kernel's image has lines
    grid: tuple[int, ...] = ()  # blocks in x, y, z
    block: tuple[int, ...] = ()  # the index of the block that faulted
    device: str = ""  # the GPU's name
    driver: str = ""  # "580.159, CUDA 13.0"
    time: str = ""  # when the core was written, ISO 8601, UTC
    address: int = -1  # that faulted
    lanes: int = -1  # of the warps that faulted
    agree: int = -1  # so many of them have an address in that page in their registers
    pool: str = ""  # "full" or "swa"
    layer: int = -1
    part: str = ""  # "K", "V" or "K or V"
    page: int = -1  # negative in front of the buffer; known if `pages` is
    pages: int = -1  # of the buffer
    token: int = -1  # in the page
    where: str = ""  # "behind", "before" or "in" the buffer, or what the address is in
    row: int = -1  # of the batch
    request: str = ""
    cause: str = ""
    fits: tuple[str, ...] = ()  # headings in TRIAGE.md that the cause fits, the likeliest first
    history: tuple[str, ...] = ()  # what the dump says of that page and row, oldest first
    notes: tuple[str, ...] = ()  # how sure it is, and what it could not read

    @property
    def of_assertion(self) -> bool:
        """True if the kernel stopped because an assertion in it failed."""
        return self.exception.endswith("warp assert")


@dataclass(frozen=True)
class Evidence:
    """The evidence that a tracer adds to a finding for the dump."""

    table: Table | None = None
    events: tuple[PageEvent, ...] = ()  # of the page that the finding is about, oldest first
    transitions: tuple[Transition, ...] = ()  # oldest first
    holdings: tuple[Holding, ...] = ()  # worst first
    asserts: tuple[DeviceAssert, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    held: tuple[Held, ...] = ()  # by the requests of the last two steps


@dataclass(frozen=True)
class OtherHook:
    """Somebody else's hook at one of our hook sites."""

    site: str
    side: str  # "outside" (it wraps ours), "inside", "instead" (of ours), "never" (it never runs)
    who: str  # "plugin timer"
    function: str  # "timed (timer.py:5)"


@dataclass(frozen=True)
class TrapRecord:
    """Everything a dump holds."""

    finding: Finding
    created: str  # ISO 8601, UTC
    versions: dict[str, str] = field(default_factory=dict)
    # The variables that may be shown (trapping/sanitise.py); "set" stands for a hidden value.
    environment: dict[str, str] = field(default_factory=dict)
    # The server's arguments that differ from SGLang's defaults, by the user's wish or by SGLang's
    # own: the value, or "set" where the value may not be shown.
    arguments: dict[str, Plain] = field(default_factory=dict)
    # All other arguments: the value, or "default".
    defaults: dict[str, Plain] = field(default_factory=dict)
    geometry: dict[str, Plain] = field(default_factory=dict)  # sizes of the model
    fixes: dict[str, str] = field(default_factory=dict)  # id -> "state: why"
    tracers: tuple[TracerStatus, ...] = ()  # and the ledger, and the step recorder
    faults: tuple[str, ...] = ()  # the faults that fired, as a schedule that can be replayed
    pools: tuple[Pool, ...] = ()
    table: Table | None = None
    steps: tuple[Step, ...] = ()  # oldest first
    events: tuple[PageEvent, ...] = ()  # of the page that the finding is about, oldest first
    transitions: tuple[Transition, ...] = ()  # of batch.spec_info, oldest first
    holdings: tuple[Holding, ...] = ()  # leaked pages and their owners, worst first
    allocator: tuple[PageEvent, ...] = ()  # the last events of all pages, oldest first
    launch: str = ""  # the same in all processes of one launch of a server
    plugins: dict[str, str] = field(default_factory=dict)  # SGLang's: name -> "allowed: where"
    others: tuple[OtherHook, ...] = ()  # other people's hooks at our sites
    asserts: tuple[DeviceAssert, ...] = ()  # of kernels, in the order in which they were printed
    lookups: tuple[Lookup, ...] = ()  # those that may have failed first, only for a device assert
    tape: Tape | None = None  # None: nothing is on it, or G4DEBUG_TAPE=0
    memory: MemoryMap | None = None  # None: not made yet, or by an older g4debug
    autopsy: Autopsy | None = None  # of the CUDA core dump, if there was one
    requests: tuple[RequestEvent, ...] = ()  # the last events of all requests, oldest first
    requests_lost: int = 0  # so many were before them
    # By the requests of the last two steps, only for a CUDA error where the page ledger is armed.
    held: tuple[Held, ...] = ()
    schema: int = SCHEMA
