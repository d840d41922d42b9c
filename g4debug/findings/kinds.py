"""The kinds of findings: one record for each kind of each tracer, from which all else is made.

A record is the only place with the meaning of a kind, its entry in TRIAGE.md, the evidence that
makes it certain, the effect of ``contain`` mode, and the command to type next. The reports of the
tracers, the advice of ``g4debug show``, and the tables in TRIAGE.md, docs/cases and docs/tracers.md
are made from the records. ``UPDATE_SNAPSHOTS=1 pytest tests/house/test_kinds.py
tests/house/test_triage.py`` writes these tables anew.

A kind that a kernel finds has a number, too, which the kernel writes into the trap buffer. These
kinds are the members of :class:`PageTableKind` and :class:`KvWritesKind`. The other kinds of these
two tracers are what their reports make of MISMATCH when they know more of the page.

A record also makes the findings of its kind: ``record.finding(site=..., headline=..., ...)``. On
their way this module is only read: no function of it is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import partial
from typing import Any, Self

from g4debug.findings.record import Finding

PAGE = "TRIAGE.md"
LAUNCH = "<your launch command>"
ARMED = f"SGLANG_TRTLLM_MHA_DEBUG=1 {LAUNCH}"


class Contain(Enum):
    """The effect of ``contain`` mode on a kind; the values are its words in docs/tracers.md."""

    MENDS = "mended"  # the bad value is replaced by the right one
    SHIELDS = "kept from harm"  # nothing crashes and nobody else suffers; this answer may be wrong
    REPORTS = "only reported"


class Place(Enum):
    """What a finding of a kind is in the log of a server that died, for ``g4debug triage``."""

    CAUSE = "cause"  # it names what is wrong
    SURFACED = "surfaced"  # it says where an error was noticed, which may have another cause
    STANDS = "stands"  # nobody is served
    ENDED = "ended"  # the process was killed, or died outside of Python
    AFTER = "after"  # it follows from what another process has met
    NOTHING = "nothing"  # nothing is wrong


@dataclass(frozen=True)
class FindingKind:
    """One kind of finding.

    ``means``, ``says``, ``look``, ``see`` and ``confirmed_by`` are Markdown. In them,
    ``[[heading]]`` stands for a link to the entry of TRIAGE.md with that heading.
    """

    check: str  # the tracer's name
    name: str  # the kind's, as dumps have it
    means: str  # the error, in words
    says: str = ""  # the headline, with … for numbers and names; '': made of `what`
    look: str = ""  # what to look at
    entry: str = ""  # heading of the entry of TRIAGE.md that explains the kind
    see: str = ""  # when another entry explains it
    # Which structures of SGLang's must say the same before it is reported. '': certain by itself.
    confirmed_by: str = ""
    in_swa: bool = False  # that is so in the SWA pool; in the full pool it is certain by itself
    suspicion: bool = False  # it is not reported either where these structures cannot be asked
    sure: bool = False  # it holds whatever our hooks have missed before
    ended: bool = False  # it is reported even if its request had ended by the time it was looked at
    outside: bool = False  # the pool has no such page or slot
    right_place: bool = False  # req_to_token says the same; the page that it names is wrong
    beside: str = ""  # of a list of tokens: the tensor that is wrong beside the list's entries
    code: int = 0  # the number that a kernel writes for it; 0 if no kernel finds it
    contain: Contain = Contain.REPORTS
    fix: str = ""  # the fix that mends a known cause
    command: str = ARMED  # what to type next
    died: bool = False  # SGLang died by itself: the finding accuses nobody
    place: Place = Place.CAUSE
    what: str = ""  # the end of the headline, and
    expected: str = ""  # what should be: templates, where the report has them from here
    reference: str = field(init=False)  # the entry, as a finding says it
    # Makes a Finding of this kind. check, kind, reference and next_command are the record's, where
    # the caller does not give another one.
    finding: Callable[..., Finding] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        says = self.says or f"`{re.sub(r'({[a-z_]*})+', '…', self.what)}`"
        object.__setattr__(self, "says", says)
        object.__setattr__(self, "reference", f"{PAGE}, '{self.entry}'")
        own: dict[str, Any] = {"kind": self.name, "reference": self.reference}
        own |= {"check": self.check, "next_command": self.command}
        object.__setattr__(self, "finding", partial(Finding, **own))

    def entry_for(self, line: str) -> str:
        """The entry of a finding that says this: who freed the page may name another one."""
        return _SHARED if _HELPER_NAME in line and _SHARED in self.see else self.entry

    def reference_for(self, line: str) -> str:
        return f"{PAGE}, '{self.entry_for(line)}'"


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
_EVICTED = "A SWA page is evicted inside the window"
_HELPER_NAME, _SHARED = "_insert_helper", "Wrong answers under load with a shared prefix"
_HELPER = f"freed by `{_HELPER_NAME}`: [[{_SHARED}]]"
_OVERWRITTEN = "not known: its record in host memory was overwritten"
_PINNED = "what else in this process writes into pinned memory"

# Texts stand below each other, and short arguments beside each other.
# fmt: off

# --- page-table ---------------------------------------------------------------------------------

_CONTAIN = f"G4DEBUG_MODE=contain {ARMED}"
_cell = partial(FindingKind, "page-table", entry="The page table names a wrong page")
_mended = partial(_cell, contain=Contain.MENDS, command=_CONTAIN)
_no_page = partial(
    _mended, means="a number that is no page of this layer's pool",
    look="`PAGE TABLE` in the report: is it one cell, or a run of cells?",
    outside=True, sure=True, ended=True,
)
_by_mapping = partial(_mended, confirmed_by=_MAPPING, in_swa=True)
_beside = partial(
    _cell, look="what builds or overwrites the metadata: was it built for another batch?",
)

FULL_INDEX = _mended(
    "full-index-in-swa-table", "the request's own full-pool page, not translated",
    "`gets full-pool page …, but its SWA pool has … pages`, or "
    "`gets full-pool page …, but the right SWA page is …`",
    entry="Illegal memory access in decode", fix="swa-state-swap",
    confirmed_by=f"{_MAPPING}, if the pool has such a page",
)
OTHER_REQUEST = _by_mapping(
    "other-request", "a page that another request holds",
    "`gets page … of request …, but the right … page is …`",
    look="`TIMELINE`: for whom the page was handed out, and by whom",
)
MISPLACED = _cell(
    "misplaced-page",
    "it agrees with `req_to_token`, but the row there names a page of the request itself for other "
    "tokens than it was handed out for: twice, or in a wrong order",
    "`reads full-pool page … for tokens …, which was handed out to the request itself`",
    look="what writes `req_to_token`; `CAUSE` says which page belongs there",
    confirmed_by=f"{_ROWS} or the prefix cache", suspicion=True, right_place=True,
)
STALE = _by_mapping(
    "stale", "a page that is free", "`gets page … (free), but the right … page is …`",
    look="`TIMELINE`: who freed the page",
)


class PageTableKind(DeviceKind):
    """The ways in which a cell, a row (SHORT), or a word beside a list of tokens is wrong."""

    RANGE = _no_page("out-of-range", says="`gets page …, but its … pool has … pages`", code=2)
    NEGATIVE = _no_page("negative", says="`gets page -…, but its … pool has … pages`", code=1)
    MISMATCH = _by_mapping(
        "mismatch",
        "another page than the one that belongs there; nothing more is known of it",
        "`gets page …, but the right … page is …`, or `gets page …, but no page belongs there`",
        look="`TIMELINE`", code=5,
    )
    ZERO = _by_mapping(
        "page-zero", "the reserved page 0", "`gets the reserved page 0`",
        look="was the cell never filled, or `req_to_token` never written?", code=4,
    )
    FREED = _cell(
        "use-after-free", "it agrees with `req_to_token`, but the page is free",
        "`reads full-pool page …, which is free`",
        look="the last `free` in `TIMELINE`, and its caller", see=_HELPER, confirmed_by=_FREE_LISTS,
        right_place=True, contain=Contain.SHIELDS, code=6,
    )
    EVICTED = _cell(
        "evicted-in-window", "the SWA page was evicted, and the window still reaches it",
        "`needs tokens … in its window, but their SWA page was evicted`",
        entry=_EVICTED, confirmed_by=_MAPPING, in_swa=True, right_place=True,
        contain=Contain.SHIELDS, code=7,
    )
    SHORT = _cell(
        "row-too-short", "the kernel reads more pages than the row has columns",
        "`reads … pages of a row that has only …`, or "
        "`reads its list up to entry …, but kv_indices has … entries`",
        look="`seq_lens` against the table; under CUDA graphs, the end of the context",
        beside="kv_indices", code=3,
    )
    FOREIGN = _cell(
        "foreign-page",
        "it agrees with `req_to_token`, but the page was handed out to another request, and the "
        "prefix cache did not lend it to this one",
        "`reads full-pool page … of request … for tokens …, because row … of req_to_token "
        "names it`",
        look="what writes `req_to_token`: the row of the finding's request is wrong, and "
        "`OWNER` names the owner of the page",
        confirmed_by=f"{_ROWS} or the prefix cache", suspicion=True, right_place=True, code=8,
    )
    # Of lists of tokens only, see tracers/page_table/token_check.py.
    INDPTR = _beside(
        "list-bounds",
        "in lists of tokens: `kv_indptr` does not end a row's list where the row's length says",
        "`gets kv_indptr[…] = …, but it must be …`",
        beside="kv_indptr", contain=Contain.MENDS, command=_CONTAIN, code=10,
    )
    SPLITS = _beside(
        "kv-splits",
        "in lists of tokens: `num_kv_splits` is outside of its range",
        "`cuts a row into … parts (num_kv_splits)`",
        beside="num_kv_splits", contain=Contain.MENDS, command=_CONTAIN, code=11,
    )
    OFFSET = _beside(
        "window-offset",
        "in lists of tokens: `window_kv_offsets` is not the position of the first token",
        "`gets window_kv_offsets = …, but the row's list begins at …`",
        beside="window_kv_offsets", contain=Contain.MENDS, command=_CONTAIN, code=12,
    )
    MASK = _beside(
        "mask-bounds",
        "in lists of tokens: `mask_indptr` and `custom_mask` do not fit the batch",
        "`gets mask_indptr = …, but the row's part of the mask begins at …`",
        beside="mask_indptr or custom_mask", contain=Contain.SHIELDS, code=13,
    )
    UNREADABLE = _cell(
        "unreadable",
        _OVERWRITTEN,
        "`the guard saw a bad cell, but its record cannot be read`",
        look=_PINNED, ended=True, code=9,
    )


# --- kv-writes ----------------------------------------------------------------------------------

WRITES = f"G4DEBUG_TRACE=kv-writes,page-table,kv-allocator,spec-lifecycle,flight-recorder {LAUNCH}"
_write = partial(FindingKind, "kv-writes", entry="KV is written to a wrong place", command=WRITES)
_moved = partial(_write, contain=Contain.MENDS, command=f"G4DEBUG_MODE=contain {WRITES}")
_no_slot = partial(
    _moved, means="the pool has no such slot",
    look="how `out_cache_loc` was made; -1 in a sliding layer: an index that the mapping does not "
    "have",
    outside=True, sure=True, ended=True,
)
_elsewhere = partial(_moved, confirmed_by=_MAPPING, in_swa=True)

WRITTEN_TO_OTHER = _elsewhere(
    "other-request", "it is in a page that another request holds",
    "`writes … to slot …, page … of request …, but its place is slot …`",
    look="`OWNER`, and `TIMELINE`: for whom the page was handed out",
)
WRITTEN_TO_FREE = _elsewhere(
    "stale", "it is in a page that is free",
    "`writes … to slot …, page … (free), but its place is slot …`",
    look="`TIMELINE`: who freed it; an `out_cache_loc` of an earlier step has such locations",
)


class KvWritesKind(DeviceKind):
    """The ways in which a location is wrong."""

    RANGE = _no_slot("out-of-range", says="`to slot …, but its … pool has … slots`", code=2)
    NEGATIVE = _no_slot("negative", says="`to slot -…, but its … pool has … slots`", code=1)
    TWICE = _moved(
        "written-twice", "another token of the same forward has it, too",
        "`and another token … to the same place`",
        look="is one of them wrong, or does a row of `req_to_token` name one page twice?",
        sure=True, code=3,
    )
    ZERO = _elsewhere(
        "page-zero", "it is in the reserved page 0, where padding goes",
        "`writes the KV of token … to the reserved page 0`",
        look="was `out_cache_loc` cleared, or a static buffer not filled?", code=4,
    )
    MISMATCH = _elsewhere(
        "mismatch",
        "it is another place than the token's, and no more is known",
        "`writes … to slot …, page …, but its place is slot …`",
        look="`CAUSE` says which of SGLang's records is the wrong one", code=5,
    )
    FREED = _write(
        "use-after-free", "it is the token's own place, but the page is free",
        "`writes … to full page …, which is free`",
        look="the last `free` in `TIMELINE`, and its caller", confirmed_by=_FREE_LISTS,
        right_place=True, contain=Contain.SHIELDS, code=6,
    )
    PADDING = _moved(
        "padding-row",
        "a padding row of a CUDA graph writes into a page that can be somebody's",
        "`writes padding (row …) to slot …`",
        look="what fills the graph's static `out_cache_loc`", code=7,
    )
    FOREIGN = _write(
        "foreign-page",
        "it agrees with `req_to_token`, but the row there names a page that does not belong there: "
        "another request's, or its own of other tokens",
        "`writes … to full page … of request …`",
        look="what writes `req_to_token`: [[The page table names a wrong page]], `foreign-page`",
        confirmed_by=_ROWS, suspicion=True, right_place=True, code=8,
    )
    CACHED = _write(
        "cached-page",
        "it is in the part of the request that the prefix cache holds",
        "`writes … to full page …, which the prefix cache holds`",
        look="the prefix length of the prefill, and `cache_protected_len`",
        confirmed_by="the prefix cache", suspicion=True, right_place=True, code=9,
    )
    UNREADABLE = _write(
        "unreadable",
        _OVERWRITTEN,
        "`a bad location was seen, but its record cannot be read`",
        look=_PINNED, ended=True, code=10,
    )


# --- kv-allocator -------------------------------------------------------------------------------

ALLOCATOR = f"G4DEBUG_TRACE=kv-allocator,page-table,pool-leak {LAUNCH}"
_page = partial(
    FindingKind, "kv-allocator", confirmed_by=_FREE_LISTS, command=ALLOCATOR,
    entry="A KV page is freed twice, handed out twice, or used after it was freed",
)
_kept = partial(_page, confirmed_by="", contain=Contain.SHIELDS)
# Contain mode mends only findings at a free; for the others, ALLOCATOR is the next command.
_stopped = partial(_page, contain=Contain.MENDS, command=_CONTAIN)
_ALLOCATOR = (
    _kept(
        "out-of-range",
        "a page that the pool does not have was handed out or freed",
        "`page … was handed out, but does not exist`, or `page … was freed, but does not exist`",
        look="earlier frees: the pages in the free list came from there",
        what="was {verb}, but does not exist", expected="pages 1..{last} of the {pool} pool",
    ),
    _kept(
        "page-zero",
        "the reserved page 0 was handed out or freed. It takes the writes of padded tokens and has "
        "no owner",
        "`page 0 is reserved, and was freed`, or `… was handed out`",
        look="an unset or cleared cell of `req_to_token` or of the mapping that was taken for a "
        "page",
        what="is reserved, and was {verb}",
        expected="pages 1..{last}; page 0 takes the writes of padded tokens and has no owner",
    ),
    _page(
        "double-alloc", "a page was handed out while somebody holds it",
        look="`CAUSE`: it was freed twice before, or the allocator handed it out twice, or the "
        "outer allocator returned another page than its pool",
        confirmed_by=f"{_FREE_LISTS}, the prefix cache and {_ROWS}",
        what="was handed out while it is held", expected="a free page",
    ),
    _kept(
        "foreign-free",
        "the release of one request frees a page of another one that still runs",
        look="what wrote the row of the request that was released: `CAUSE` says whether its row "
        "names the page",
        confirmed_by=_ROWS,
        what="of request {owner}, which still runs, is freed by the release of request {request}",
        expected="pages that were handed out to the request that is released, or to nobody who "
        "runs",
    ),
    _page(
        "freed-while-read",
        "a full page of the prefix cache is freed while a running request's row of `req_to_token` "
        "names it. SGLang locks such pages; no count is wrong, and the answer is, as soon as "
        "somebody else gets the page",
        look="the caller", see=_HELPER, confirmed_by=_ROWS, fix="locked-prefix",
        what="of the prefix cache is freed while request {request} reads it",
        expected="pages of the prefix cache are freed when no running request reads them",
    ),
    _stopped(
        "double-free", "a page was given back twice",
        look="the two callers in the timeline", what="was freed twice",
        expected="a page that is held",
    ),
    _stopped(
        "free-unallocated", "a page was given back that was never handed out",
        look="the caller: where it has its index from", what="was freed, but never handed out",
        expected="a page that is held",
    ),
    _page(
        "use-after-free",
        "a sequence continues in a page that it does not hold any more. SWA page 0 here means that "
        "its SWA page was evicted",
        look="the last `free` or `evict` in the timeline",
        what="is not held, but a sequence continues in it",
        expected="the page with the sequence's last token is held",
    ),
    _stopped(
        "mapping-mismatch",
        "`full_to_swa_index_mapping` names another SWA page than the one that was handed out with "
        "the full page",
        look="`CAUSE`: it was written wrong by the allocator itself, or overwritten later; `got` "
        "has both pages",
        confirmed_by=f"{_MAPPING} and {_ROWS}", what="does not match full_to_swa_index_mapping",
        expected="the SWA page that was handed out together with the full page",
    ),
    _page(
        "maps-freed",
        "the mapping points to a free SWA page: the page was freed by itself, or the mapping was "
        "written afterwards",
        look="a caller that frees SWA pages without `free_swa`, which clears the mapping",
        confirmed_by=f"{_MAPPING}, {_ROWS} or {_FREE_LISTS}",
        what="is free, but full_to_swa_index_mapping points to it",
        expected="a mapping that points only to SWA pages that are held",
    ),
    _page(
        "evicted-in-window", "a SWA page was evicted that the request's next query attends to",
        entry=_EVICTED, confirmed_by=f"{_MAPPING} and {_ROWS}",
        what="was evicted inside the window of request {request}",
        expected="only pages that lie completely before the window are evicted",
    ),
)

# --- pool-leak ----------------------------------------------------------------------------------

_census = partial(
    FindingKind, "pool-leak", entry="Pool memory leak detected",
    command=f"G4DEBUG_TRACE=kv-allocator {LAUNCH}",
)
_POOL_LEAK = (
    _census(
        "leaked",
        "The page is free nowhere, not in the prefix cache, and in no live request's row. `due` "
        "names the release that did not give it back.",
        command=f"G4DEBUG_LEAK_STEPS=1 {ARMED}", what="neither free, cached nor owned",
    ),
    _census(
        "double",
        "The page is free and in use at once: its next owner overwrites the old one's KV. Run "
        "again: `kv-allocator` stops at the free itself.",
        what="free and in use at once",
    ),
    _census(
        "repeated",
        "The page is twice in the free list: two requests will get it. `kv-allocator` stops at the "
        "second free.",
        what="in the free list more than once",
    ),
    _census(
        "outside", "The free list has an index that is no page of the pool.",
        what="in the free list, although the pool has no such page",
    ),
    _census(
        "shared",
        "Two nodes of the prefix cache hold the page: one of them answers for the other one's "
        "tokens.",
        what="held by two nodes of the prefix cache",
    ),
    _census(
        "locked",
        "The server is idle, and nodes of the prefix cache are still locked. Their pages can never "
        "be evicted.",
        "`the prefix cache has … tokens locked in the … pool, and no request runs`",
    ),
    _census(
        "miscounted",
        "The prefix cache's own figures for evictable and for locked tokens contradict its nodes. "
        "SGLang admits requests by these figures, and its own leak check dies of them.",
        "`the prefix cache says that it has … tokens of the … pool, and its nodes have …`",
    ),
    _census(
        "row-repeated",
        "A row of `req_to_token` is in the list of free rows twice: two requests will get it. Or "
        "what is in that list is no row for a request.",
        "`… of req_to_token … in the list of free rows…`",
        command="g4debug show --all <this dump>",
    ),
    _census(
        "row",
        "The server is idle, and a request still holds its row of `req_to_token`, and with it its "
        "pages; or the row is not free and nobody holds it.",
        "`requests still hold a row of req_to_token`, "
        "`1 request still holds a row of req_to_token`, or "
        "`… of req_to_token is neither free nor held by a request`",
        command="g4debug show --all <this dump>",
    ),
)

# --- prefix-cache -------------------------------------------------------------------------------

_node = partial(
    FindingKind, "prefix-cache", entry="The prefix cache gets or gives wrong pages",
    command=f"G4DEBUG_TRACE=prefix-cache,kv-allocator,page-table,pool-leak {LAUNCH}",
)
_over = partial(
    _node, look="what writes the request's row of `req_to_token`",
    expected="the request's own pages, or those that the prefix cache lent to it, in the order of "
    "its tokens, each once",
)
_out_of = partial(
    _node, look="`got` says who handed the page over, as which tokens; the headline has the node",
    expected="the pages that were handed over for these tokens",
)
_TREE, _RUNS = "the nodes of the prefix cache", f"{_ROWS} and {_FREE_LISTS}"
_PREFIX_CACHE = (
    _over(
        "beyond", "a request hands over more tokens than it has KV for",
        "`… hands over tokens that it has no KV for`",
        look="whether the chunk was admitted (upstream #24252)",
        what="hands over tokens that it has no KV for",
        expected="no more tokens than the request has KV for",
    ),
    _over(
        "protected",
        "a request counts more or fewer of its first tokens as the prefix cache's than it has",
        "`… has a wrong cache_protected_len`",
        look="what sets `cache_protected_len`: the match, the insert, a retraction",
        what="has a wrong cache_protected_len",
        expected="the end of the last node that the request matched or inserted",
    ),
    _over(
        "other-key",
        "a request hands over its pages as those of other tokens: who begins with these reads its "
        "KV",
        "`… hands over its pages as those of other tokens`",
        look="what makes the key of the insert, and the request's tokens",
        what="hands over its pages as those of other tokens",
        expected="a key of the request's own tokens, in its own namespace",
    ),
    _over(
        "lent-row",
        "a request's row of `req_to_token` names another page for its first tokens than the prefix "
        "cache has: the request reads somebody else's KV",
        confirmed_by=_TREE, what="but the prefix cache has another",
        expected="the page that the prefix cache has for these tokens",
    ),
    _over(
        "no-page", "a slot that is in no page of the pool is handed over or handed out",
        what="which the pool does not have",
    ),
    _over(
        "not-in-order", "the slots of a page are not all of one page, from its first to its last",
        what="but its slots are not in order",
    ),
    _over("twice", "a request hands over one page twice", what="and it has handed it over before"),
    _over(
        "holds-other",
        "a request hands over a page that the prefix cache has already, for other tokens",
        confirmed_by=_TREE, suspicion=True, what="but the page holds other tokens",
    ),
    _over(
        "freed", "a request hands over a page that is free",
        confirmed_by=_FREE_LISTS, suspicion=True, what="but the page is free",
    ),
    _over(
        "foreign", "a request hands over a page of another request, which still runs",
        confirmed_by=_ROWS, suspicion=True, what="but another request has the page",
    ),
    _over(
        "misplaced", "a request hands over a page of its own in the wrong place",
        confirmed_by=_FREE_LISTS, suspicion=True, what="but it was given for other tokens",
    ),
    _out_of(
        "wrong-page",
        "the prefix cache hands out a page that was handed over for other tokens: the request "
        "reads somebody else's KV",
        what="but the page holds other tokens",
    ),
    _out_of(
        "freed-page",
        "the prefix cache hands out a page that is free, or that was given to somebody else since",
        confirmed_by=_RUNS, suspicion=True, what="but the page was freed",
    ),
    _out_of(
        "length", "a node of the prefix cache has another number of slots than of tokens",
        "`a node of the prefix cache has not one slot for each token: …`",
        what="a node of the prefix cache has not one slot for each token",
        expected="one slot for each token of the node's key",
    ),
)

# --- kv-integrity -------------------------------------------------------------------------------

_data = partial(
    FindingKind, "kv-integrity", entry="Wrong answers, no crash: KV is corrupted",
    command=f"G4DEBUG_TRACE=kv-integrity,page-table,kv-allocator,spec-lifecycle {LAUNCH}",
)
_KV_INTEGRITY = (
    _data(
        "write-after-free",
        "Somebody wrote into a page that was free, through a stale `out_cache_loc` or page table. "
        "The finding names layer, token slot, last and next owner.",
        "`was written after it was freed`",
    ),
    _data(
        "kv-changed",
        "The KV of complete, committed tokens has changed: a memory error, or a write into "
        "somebody else's page.",
        "`KV that was committed has changed`",
    ),
    _data(
        "nan",
        "A page became complete with NaN or Inf in it. The layer that is named computed it, or "
        "read it.",
        "`NaN or Inf in … of layer …`",
    ),
)

# --- spec-lifecycle -----------------------------------------------------------------------------

EAGER = f"{LAUNCH} --disable-cuda-graph"  # tells whether a CUDA graph has to do with it
_step = partial(
    FindingKind, "spec-lifecycle", entry="Speculative decoding: what a step leaves is wrong",
    command="g4debug doctor",
)
_state = partial(_step, what="batch.spec_info is {a_got}, not {a_expected}")
_number = partial(_step, what="{got}{about}, should be {number}")
_value = partial(_step, what="{got}{about}, expected {expected}", command=EAGER)
_SPEC_LIFECYCLE = (
    _state(
        "spec-info-dropped", "a batch with live requests has no draft state",
        "`batch.spec_info is None, not a …`",
        look="who set `batch.spec_info = None` since the last hand-over in the path",
    ),
    _state(
        "wrong-type",
        "`batch.spec_info` is an object of another stage, or another step's",
        "`batch.spec_info is a …, not a …`, or `batch.spec_info is another object, not the …`",
        look="the last hand-over in the path: who put it there", fix="spec-batch-guards",
    ),
    _step(
        "wrong-shape",
        "a tensor of the draft state does not have one row for each request",
        "`… has … rows, should have … rows`, or `… is None, should have … rows`",
        look="`filter_batch` and `merge_batch`: rows were lost, kept or merged twice",
        fix="spec-batch-guards", what="{got}, should have {expected}",
    ),
    _number(
        "accept-length",
        "a request accepted fewer than 1 token, or more than the drafts and the bonus token",
        "`accept length …, should be …`, `accept lengths of … requests`, or "
        "`num_accept_tokens = …, should be …`",
        look="the verify's `num_correct_drafts`; the bonus token always counts", command=EAGER,
    ),
    _number(
        "seq-len",
        "lengths on the host, on the device and `kv_committed_len` disagree, or a step reads "
        "another length than the request's last step left",
        "`seq_lens… = …, should be …`, or `seq_lens… of … requests, should be …`",
        look="what changed `seq_lens` between the verify and the next draft", command=EAGER,
    ),
    _number(
        "bookkeeping",
        "`output_ids`, `kv_committed_len` or `spec_verify_ct` advanced twice, or not at all; or "
        "`kv_allocated_len` or `req_pool_idx` changed; or `swa_evicted_seqlen` is negative",
        "`output_ids`, `spec_verify_ct`, `…len` or `req_pool_idx`, then `= …, should be …`",
        look="the v1 verify and the v2 output processor both count; one of them must go. "
        "From SGLang 0.5.14 on only the processing of a result counts",
    ),
    _step(
        "stale-hidden-state", "the draft got hidden states of another step, or of another request",
        look="a buffer that is used again before it is read", command=EAGER,
        what="the hidden states are {got}, not {expected}",
    ),
    _step(
        "future-row",
        "a step reads or writes a row of SGLang's `FutureMap` that is not its request's, or one "
        "that the request's last step did not write",
        "`future_indices = …`, `row … of the FutureMap written for two requests`, `written …`, "
        "`not stashed` or `other rows than those of the batch`",
        look="what filters, merges or replaces `future_indices` and `req_pool_indices`; "
        "`_relay_forward_payload`",
        what="{got}{about}, expected {expected}",
    ),
    _step(
        "publish-order",
        "the new lengths were published before the verify, twice, never, or were others",
        "`published before the verify`, `published … times`, `published other lengths` or "
        "`not published`",
        look="who calls `on_publish` in the worker's `forward_batch_generation`",
        what="{got}, expected {expected}",
    ),
    _step(
        "bonus-token",
        "the draft, and so the verify, begins with another token than the request's last one",
        "`the draft goes on from …, not the last token of the request`, or "
        "`the draft goes on from …, not the token as of …`",
        look="the stash of the step before, and the gather of this one", command=EAGER,
        what="the draft goes on from {got}{about}, not {expected}",
    ),
    _value(
        "verify-input",
        "the verify gets other tokens, positions or another tree than the draft made from its "
        "input",
        "`draft_token[…] is …`, `input_ids[…] is …`, `positions[…] = …` or `retrieve_…[…] = …`, "
        "then `expected …`",
        look="what runs between the two ends that the finding names",
    ),
    _value(
        "verify-result",
        "the result that a verify hands on (tokens, accept lengths, accepted indices, bonus "
        "tokens) differs from its kernel's, or does not follow from the target's choice",
        "`accept_lens = …`, `accept_index[…] = …`, `predict… is …` or `bonus_tokens is …`, then "
        "`expected …`",
        look="what runs between the two ends that the finding names",
    ),
    _value(
        "sampled-token",
        "a token differs from the sampled one, in the request's output or where the next step "
        "begins with it, or a prefill's token from the request's; with and without speculative "
        "decoding",
        "`output_ids is …`, `input_ids is …` or `next_token_ids is …`, then `expected …`",
        look="the two ends that the finding names: the result's way to the host, or the "
        "`FutureMap`",
    ),
    _value(
        "forward-row",
        "a forward is given another row of `req_to_token` than its request has, or one that the "
        "table has not; with and without speculative decoding",
        "`req_pool_indices = …`, then `expected req_pool_indices = …`",
        look="what filters, merges or replaces `req_pool_indices`",
    ),
    _step(
        "forward-place",
        "a forward is to read or write KV in a slot that the pool does not have; with and without "
        "speculative decoding",
        "`out_cache_loc[…] = …` or `req_to_token[…] = …`, then `expected … = 0..…, a slot of the "
        "pool`",
        look="what writes `out_cache_loc` behind its allocation, or the row of `req_to_token`; arm "
        "`page-table` and `kv-writes`, which judge all of them",
        command=WRITES, what="{got}{about}, expected {expected}",
    ),
    _value(
        "position",
        "the target is given a position that is not the token's place in its sequence; with and "
        "without speculative decoding",
        "`positions = …` or `positions[…] = …`, then `expected …, by …`",
        look="what runs between the making of the batch and the forward",
    ),
    _step(
        "allocated-len",
        "a verify writes KV for which the request was allocated no room",
        "`kv_allocated_len = …, should be at least …`",
        look="`eagle_prepare_for_decode`, which allocates ahead of `kv_committed_len`; what sets "
        "`kv_allocated_len`",
        what="{got}{about}, should be {least}",
    ),
    _step(
        "draft-places",
        "the draft's forward has places to write KV to, which it never does, and not one for each "
        "token",
        "`the draft's forward has … places in out_cache_loc, expected None…`",
        look="SGLang 0.5.14 without CUDA graphs leaves a prefill's there and dies one line later "
        "(upstream #29616; 0.5.15 sets them to None)",
        what="the draft's forward has {got}, expected {expected}",
    ),
    _state(
        "verify-input-left",
        "the verify input is still on the batch when the next hand-over wants a draft input",
        "`batch.spec_info is a verify-input (…), not a draft-input`",
        entry="AttributeError in merge_batch (FROZEN_KV_MTP)", fix="spec-batch-guards",
    ),
    _step(
        "draft-pool",
        "the backend that computes the draft's attention has another KV pool than the target's",
        "`the draft's … is to read the target's KV pool …, and computes on …`",
        entry="IndexError with split attention backends and MTP", fix="hybrid-pool-swap",
        command=f"G4DEBUG_FIX_HYBRID_POOL_SWAP=1 {LAUNCH}",
        what="the draft's {what} is to read {expected}, and computes on {got}",
    ),
    _step(
        "draft-embedding",
        "the draft looks tokens up in a table that does not have a row for each token",
        "`the draft looks tokens up in an embedding table of … rows`",
        entry="MTP with tensor parallelism: the draft has only a part of the embedding",
        fix="draft-embedding-shard",
        what="the draft looks tokens up in {got}, and the vocabulary has {missing} tokens more",
    ),
)

# --- flight-recorder ----------------------------------------------------------------------------

_RANKS = "One rank stops, or the ranks differ"
_end = partial(
    FindingKind, "flight-recorder",
    entry="A CUDA error or exception that no other entry has",
)
_dead = partial(
    _end, entry="A scheduler is killed, or dies outside of Python", died=True,
    command="dmesg -T | grep -iE 'out of memory|killed process'", place=Place.ENDED,
)
_FLIGHT_RECORDER = (
    _end(
        "device-assert",
        "An assertion failed in a kernel, mostly because an index was out of range.",
        "`flight-recorder in …: an index was out of range in a kernel (device-side assert…`, or "
        "`an assertion failed in a kernel (device-side assert…`",
        entry="Device-side assert triggered", died=True,
    ),
    _end(
        "cuda-error",
        "HISTORY is where the error *surfaced*. The kernel that failed was launched before, in "
        "this step or in the one before. With CUDA graphs no Python line belongs to it.",
        "`flight-recorder in …: …Error: CUDA error: …`",
        died=True, place=Place.SURFACED,
    ),
    _end(
        "exception", "HISTORY is the place. The exception went on as it was.",
        "`flight-recorder in …:` and any other exception",
        died=True, place=Place.SURFACED,
    ),
    _end(
        "hang",
        "The scheduler begins no step, although requests wait or run, or makes no round at all.",
        "`flight-recorder: the scheduler hangs: …`",
        "GOT says which check of SGLang's refuses which request, and who holds what it lacks",
        entry="The scheduler hangs", place=Place.STANDS,
    ),
    _end(
        "busy",
        "Nothing is known to be wrong: the scheduler compiled kernels, loaded weights or did other "
        "work that takes minutes, and was about to be ended.",
        "`flight-recorder: no hang is known: …`",
        entry="The scheduler hangs", command="", place=Place.NOTHING,
    ),
    _end(
        "starved",
        "A request makes no progress for thousands of steps, although it had begun or others that "
        "came later are served; or for ten minutes in which others overtook it.",
        "`flight-recorder: request … made no progress for … steps (… s), while others did`",
        "GOT says which check of SGLang's refuses it, and who holds what it lacks",
        entry="The scheduler hangs", place=Place.STANDS,
    ),
    _dead(
        "killed",
        "The scheduler got SIGKILL, and not from its server; or another signal that is no fault.",
        "`flight-recorder in …: the scheduler was killed (SIGKILL)`, or "
        "`the scheduler was killed by signal … (SIG…)`",
    ),
    _dead(
        "oom-killed",
        "The scheduler got SIGKILL, and the OOM killer has killed a process of its cgroup.",
        "`flight-recorder in …: the scheduler was killed, as it seems by the OOM killer`",
    ),
    _dead(
        "native-crash",
        "The scheduler died of another signal: a fault or `abort()` in a library.",
        "`flight-recorder in …: the scheduler died of signal … (SIG…), outside of Python`",
        command="grep -A40 'Fatal Python error' <your log>",
    ),
    _dead(
        "gone",
        "The scheduler ended without an exception, or nobody was left to see how it ended.",
        "`flight-recorder in …: the scheduler is gone, and nobody saw how it ended`, or "
        "`the scheduler ended with exit code …, and no exception was seen`",
    ),
    _end(
        "other-rank",
        "Another rank stopped the server, or ended. This one had found nothing.",
        "`flight-recorder: rank … stopped the server: …`, or `flight-recorder: rank … ended: …`",
        entry=_RANKS, command="g4debug list", place=Place.AFTER,
    ),
    _end(
        "asked",
        "Nothing is wrong: somebody asked for the tape, to replay it.",
        "`flight-recorder in …: the tape was asked for`",
        command="", place=Place.NOTHING,
    ),
)

# --- rank-divergence ----------------------------------------------------------------------------

RANKS_DIFFER = FindingKind(
    "rank-divergence", "ranks-differ",
    "Right before a step, two ranks were about to do different work.",
    "`rank-divergence in step …: … and … differ in …`",
    entry=_RANKS, command="",
)

# --- all of them --------------------------------------------------------------------------------

KINDS: dict[str, dict[str, FindingKind]] = {}  # check -> name -> its record
for _kind in (
    *(FULL_INDEX, OTHER_REQUEST, STALE, MISPLACED, *(kind.record for kind in PageTableKind)),
    *_ALLOCATOR,
    *_SPEC_LIFECYCLE,
    *_POOL_LEAK,
    *_PREFIX_CACHE,
    *_KV_INTEGRITY,
    *(WRITTEN_TO_OTHER, WRITTEN_TO_FREE, *(kind.record for kind in KvWritesKind)),
    *_FLIGHT_RECORDER,
    RANKS_DIFFER,
):
    KINDS.setdefault(_kind.check, {})[_kind.name] = _kind
FORMER_CHECKS = {"swa-allocator": "kv-allocator"}  # what older dumps call a check


def place_of(finding: Finding) -> Place | None:
    """What a finding of its kind is in a log; None for a kind that this g4debug does not know."""
    kind = KINDS.get(finding.check, {}).get(finding.kind)
    return None if kind is None else kind.place
