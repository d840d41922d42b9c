"""What a kind of finding is: one record for each kind of each tracer, and everything else from it.

A record is the only place that says what a kind means, where TRIAGE.md explains it, what makes it
certain, what ``contain`` mode does about it, and what to type next. The reports of the tracers, the
advice of ``g4debug show``, and the tables in TRIAGE.md and docs/tracers.md are made from the
records. ``UPDATE_DOCS=1 pytest tests/house/test_kinds.py`` writes the tables anew.

A kind that a kernel finds has a number, too, which the kernel writes into the trap buffer. These
kinds are the members of :class:`PageTableKind` and :class:`KvWritesKind`. The other kinds of these
two tracers are what their reports make of MISMATCH when they know more of the page.

On the way of a finding this module is only read: nothing in it is called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import partial
from typing import Any, Self

LAUNCH = "<your launch command>"
ARMED = f"SGLANG_TRTLLM_MHA_DEBUG=1 {LAUNCH}"


class Contain(Enum):
    """What ``contain`` mode does about a kind; the values are its words in docs/tracers.md."""

    MENDS = "mended"  # what is bad is replaced by what is right
    SHIELDS = "kept from harm"  # nothing crashes and nobody else suffers; this answer may be wrong
    REPORTS = "only reported"


@dataclass(frozen=True)
class FindingKind:
    """One kind of finding.

    check: the tracer's name. name: the kind's, in dumps. means: what is wrong, and look: what to
    look at then. says: what the headline says, with ``…`` for numbers and names. These three are
    Markdown, in which ``[[heading]]`` stands for a link to an entry of TRIAGE.md. entry: the
    heading of the entry that explains the kind. reference: the same, as a finding says it.

    confirmed_by: which structures of SGLang's must say the same before the kind is reported, '' if
    it is certain by itself. in_swa: that is so in the SWA pool, and in the full pool it is certain
    by itself. suspicion: it is not reported either where they cannot be asked. sure: it holds
    whatever our hooks have missed before. ended: it is reported even if its request had ended
    before the result of the step was looked at.

    outside: the pool has no such page or slot. right_place: ``req_to_token`` says the same, and
    what is wrong is the page that it names. beside: the tensor that is wrong beside the entries of
    a list of tokens. code: the number that a kernel writes, 0 if none finds this kind.

    contain: what contain mode does about it. command: what to type next. what, expected: the end of
    the headline, and what should be, as templates, where a report has them from here.
    """

    check: str
    name: str
    means: str
    says: str
    entry: str
    look: str = ""
    confirmed_by: str = ""
    in_swa: bool = False
    suspicion: bool = False
    sure: bool = False
    ended: bool = False
    outside: bool = False
    right_place: bool = False
    beside: str = ""
    code: int = 0
    contain: Contain = Contain.REPORTS
    command: str = ARMED
    what: str = ""
    expected: str = ""
    reference: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", f"TRIAGE.md, '{self.entry}'")


class DeviceKind(IntEnum):
    """A kind that a kernel finds. Its value is the number that is written, see ``record``."""

    record: FindingKind

    def __new__(cls, record: Any) -> Self:  # Any: mypy also takes Kind(number) for a call of this
        member = int.__new__(cls, record.code)
        member._value_ = record.code
        member.record = record
        return member


_FREE_LISTS = "SGLang's free lists"
_MAPPING = "the full-to-SWA mapping"
_ROWS = "the rows of `req_to_token`"
_CRASH = "Illegal memory access in decode"
_PREFIXES = "Wrong answers under load with a shared prefix"
_EVICTED = "A SWA page is evicted inside the window"
_HELPER = f"`_insert_helper` is [[{_PREFIXES}]]"
_OVERWRITTEN = "not known: its record in host memory was overwritten"
_PINNED = "what else in this process writes into pinned memory"

# --- page-table ---------------------------------------------------------------------------------

_CONTAIN = f"G4DEBUG_MODE=contain {ARMED}"
_cell = partial(FindingKind, "page-table", entry="The page table names a wrong page")
_mended = partial(_cell, contain=Contain.MENDS, command=_CONTAIN)
_no_page = partial(
    _mended,
    means="a number that is no page of this layer's pool",
    look="`PAGE TABLE` in the report: is it one cell, or a run of cells?",
    outside=True,
    sure=True,
    ended=True,
)
_by_mapping = partial(_mended, confirmed_by=_MAPPING, in_swa=True)
_beside = partial(_cell, look="what makes or overwrites the metadata: is it another batch's?")

FULL_INDEX = FindingKind(
    "page-table",
    "full-index-in-swa-table",
    "the request's own full-pool page, not translated",
    "`gets full-pool page …, but its SWA pool has … pages`, or "
    "`gets full-pool page …, but the right SWA page is …`",
    _CRASH,
    look=f"[[{_CRASH}]]",
    confirmed_by=f"{_MAPPING}, if the pool has such a page",
    contain=Contain.MENDS,
    command=_CONTAIN,
)
OTHER_REQUEST = _by_mapping(
    "other-request",
    "a page that another request holds",
    "`gets page … of request …, but the right … page is …`",
    look="`TIMELINE`: for whom the page was handed out, and by whom",
)
STALE = _by_mapping(
    "stale",
    "a page that is free",
    "`gets page … (free), but the right … page is …`",
    look="`TIMELINE`: who freed the page",
)


class PageTableKind(DeviceKind):
    """What is wrong with a cell, with a row (SHORT), or with a word beside a list of tokens."""

    RANGE = _no_page("out-of-range", says="`gets page …, but its … pool has … pages`", code=2)
    NEGATIVE = _no_page("negative", says="`gets page -…, but its … pool has … pages`", code=1)
    MISMATCH = _by_mapping(
        "mismatch",
        "another page than the one that belongs there; nothing more is known of it",
        "`gets page …, but the right … page is …`, or `gets page …, but no page belongs there`",
        look="`TIMELINE`",
        code=5,
    )
    ZERO = _by_mapping(
        "page-zero",
        "the reserved page 0",
        "`gets the reserved page 0`",
        look="was the cell never filled, or `req_to_token` never written?",
        code=4,
    )
    FREED = _cell(
        "use-after-free",
        "it agrees with `req_to_token`, but the page is free",
        "`reads full-pool page …, which is free`",
        look=f"the last `free` in `TIMELINE`, and its caller; {_HELPER}",
        confirmed_by=_FREE_LISTS,
        right_place=True,
        contain=Contain.SHIELDS,
        code=6,
    )
    EVICTED = FindingKind(
        "page-table",
        "evicted-in-window",
        "the SWA page was evicted, and the window still reaches it",
        "`needs tokens … in its window, but their SWA page was evicted`",
        _EVICTED,
        look=f"[[{_EVICTED}]]",
        confirmed_by=_MAPPING,
        in_swa=True,
        right_place=True,
        contain=Contain.SHIELDS,
        code=7,
    )
    SHORT = _cell(
        "row-too-short",
        "the kernel reads more pages than the row has columns",
        "`reads … pages of a row that has only …`, or "
        "`reads its list up to entry …, but kv_indices has … entries`",
        look="`seq_lens` against the table; under CUDA graphs, the end of the context",
        beside="kv_indices",
        code=3,
    )
    FOREIGN = _cell(
        "foreign-page",
        "it agrees with `req_to_token`, but the page was handed out to another request, whose row "
        "names it, too, and the prefix cache lent it to neither",
        "`reads full-pool page … of request … for tokens …, because row … of req_to_token "
        "names it`",
        look="what writes `req_to_token`: the request of the finding is the one whose row is "
        "wrong, `OWNER` says whose page it is",
        confirmed_by=_ROWS,
        suspicion=True,
        right_place=True,
        code=8,
    )
    # Of lists of tokens only, see tracers/page_table/token_check.py.
    INDPTR = _beside(
        "list-bounds",
        "of `triton`: `kv_indptr` does not end a row's list where the row's length says",
        "`gets kv_indptr[…] = …, but it must be …`",
        beside="kv_indptr",
        contain=Contain.MENDS,
        command=_CONTAIN,
        code=10,
    )
    SPLITS = _beside(
        "kv-splits",
        "of `triton`: `num_kv_splits` does not lie in what is allowed",
        "`cuts a row into … parts (num_kv_splits)`",
        beside="num_kv_splits",
        contain=Contain.MENDS,
        command=_CONTAIN,
        code=11,
    )
    OFFSET = _beside(
        "window-offset",
        "of `triton`: `window_kv_offsets` is not the position of the first token in the list",
        "`gets window_kv_offsets = …, but the row's list begins at …`",
        beside="window_kv_offsets",
        contain=Contain.MENDS,
        command=_CONTAIN,
        code=12,
    )
    MASK = _beside(
        "mask-bounds",
        "of `triton`: `mask_indptr` and `custom_mask` do not fit the batch",
        "`gets mask_indptr = …, but the row's part of the mask begins at …`",
        beside="mask_indptr or custom_mask",
        contain=Contain.SHIELDS,
        code=13,
    )
    UNREADABLE = _cell(
        "unreadable",
        _OVERWRITTEN,
        "`the guard saw a bad cell, but what it left cannot be read`",
        look=_PINNED,
        ended=True,
        code=9,  # the guard never writes this
    )


# --- kv-writes ----------------------------------------------------------------------------------

_WRITES = f"G4DEBUG_TRACE=kv-writes,page-table,kv-allocator,spec-lifecycle,flight-recorder {LAUNCH}"
_write = partial(FindingKind, "kv-writes", entry="KV is written to a wrong place", command=_WRITES)
_moved = partial(_write, contain=Contain.MENDS, command=f"G4DEBUG_MODE=contain {_WRITES}")
_no_slot = partial(
    _moved,
    means="the pool has no such slot",
    look="how `out_cache_loc` was made; -1 in a sliding layer: an index that the mapping does not "
    "have",
    outside=True,
    sure=True,
    ended=True,
)
_elsewhere = partial(_moved, confirmed_by=_MAPPING, in_swa=True)

WRITTEN_TO_OTHER = _elsewhere(
    "other-request",
    "it is in a page that another request holds",
    "`writes … to slot …, page … of request …, but its place is slot …`",
    look="`OWNER`, and `TIMELINE`: for whom the page was handed out",
)
WRITTEN_TO_FREE = _elsewhere(
    "stale",
    "it is in a page that is free",
    "`writes … to slot …, page … (free), but its place is slot …`",
    look="`TIMELINE`: who freed it; an `out_cache_loc` of an earlier step has such locations",
)


class KvWritesKind(DeviceKind):
    """What is wrong with a location."""

    RANGE = _no_slot("out-of-range", says="`to slot …, but its … pool has … slots`", code=2)
    NEGATIVE = _no_slot("negative", says="`to slot -…, but its … pool has … slots`", code=1)
    TWICE = _moved(
        "written-twice",
        "another token of the same forward has it, too",
        "`and another token … to the same place`",
        look="is one of them wrong, or does a row of `req_to_token` name one page twice?",
        sure=True,
        code=3,
    )
    ZERO = _elsewhere(
        "page-zero",
        "it is in the reserved page 0, where padding goes",
        "`writes the KV of token … to the reserved page 0`",
        look="was `out_cache_loc` cleared, or a static buffer not filled?",
        code=4,
    )
    MISMATCH = _elsewhere(
        "mismatch",
        "it is another place than the token's, and no more is known",
        "`writes … to slot …, page …, but its place is slot …`",
        look="`CAUSE` says which of SGLang's records is the wrong one",
        code=5,
    )
    FREED = _write(
        "use-after-free",
        "it is the token's own place, but the page is free",
        "`writes … to full page …, which is free`",
        look="the last `free` in `TIMELINE`, and its caller",
        confirmed_by=_FREE_LISTS,
        right_place=True,
        contain=Contain.SHIELDS,
        code=6,
    )
    PADDING = _moved(
        "padding-row",
        "a padding row of a CUDA graph writes into a page that can be somebody's",
        "`writes padding (row …) to slot …`",
        look="what fills the graph's static `out_cache_loc`",
        code=7,
    )
    FOREIGN = _write(
        "foreign-page",
        "it agrees with `req_to_token`, whose row names another request's page",
        "`writes … to full page … of request …`",
        look="what writes `req_to_token`: [[The page table names a wrong page]], `foreign-page`",
        confirmed_by=_ROWS,
        suspicion=True,
        right_place=True,
        code=8,
    )
    CACHED = _write(
        "cached-page",
        "it is in the part of the request that the prefix cache holds",
        "`writes … to full page …, which the prefix cache holds`",
        look="the prefix length of the prefill, and `cache_protected_len`",
        confirmed_by="the prefix cache",
        suspicion=True,
        right_place=True,
        code=9,
    )
    UNREADABLE = _write(
        "unreadable",
        _OVERWRITTEN,
        "`a bad location was seen, but what was left of it cannot be read`",
        look=_PINNED,
        ended=True,
        code=10,  # the kernel never writes this
    )
