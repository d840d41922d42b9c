"""Each kind of finding names its cause: two things that go wrong must be told from each other.

The table is ``CAUSES``. A row has the kind of the finding, words of its CAUSE, and the thing that
is broken. These are words of that cause alone: no other row of the kind may get them. Where the
evidence does not single out a cause, CAUSE must say "not known". Each kind has two rows at least.

That thing is a function of the fixture ``arm`` that returns the finding. The functions above
each tracer's rows make it. Most of them take *steps*, which break one thing each of the requests
that are served (``it``).
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from real_backend import LAYERS, PAGE, allocator_class, draft_worker, dummy_pool
from real_triton import TritonRig
from releases import Request, kv_of
from served_rows import TOKENS, Serving, it_row, release, row_of, running
from triton_forward import prepared, run
from writing import ARMED, Writing, put, scheduled, swa_loc

from g4debug import plugin
from g4debug.dumps import reading
from g4debug.findings import process_end
from g4debug.findings.black_box import Content, Owner
from g4debug.findings.kinds import KINDS
from g4debug.findings.launch_memory import ALIVE, STOPPED, Seat, Stop
from g4debug.findings.process_end import End
from g4debug.findings.record import Lookup, PageEvent
from g4debug.findings.steps import Recorder
from g4debug.hooking.prefix_tree import Sizes
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.sanitizer import trap_buffer
from g4debug.settings import Settings
from g4debug.tracers.flight_recorder import box_dumps, lookups
from g4debug.tracers.flight_recorder import report as flight_report
from g4debug.tracers.flight_recorder.assert_evidence import Asserted
from g4debug.tracers.flight_recorder.box_dumps import Maker
from g4debug.tracers.flight_recorder.reasons import OWN_PREFIX, PARKED, Reason
from g4debug.tracers.flight_recorder.waits import Wait
from g4debug.tracers.flight_recorder.work import Place
from g4debug.tracers.kv_allocator import causes as allocator_causes
from g4debug.tracers.kv_allocator import check as allocator_check
from g4debug.tracers.kv_integrity import causes as kv_causes
from g4debug.tracers.kv_writes import report as writes_report
from g4debug.tracers.kv_writes.check import Kind as WriteKind
from g4debug.tracers.kv_writes.checked_writes import Write
from g4debug.tracers.page_table import report as table_report
from g4debug.tracers.page_table.checked_table import cell_of
from g4debug.tracers.pool_leak import report as leak_report
from g4debug.tracers.pool_leak.check import take_census
from g4debug.tracers.pool_leak.look import View
from g4debug.tracers.prefix_cache import report as prefix_report
from g4debug.tracers.prefix_cache.check import Known, handed_out, handed_over, whole_pages
from g4debug.tracers.prefix_cache.check import Violation as PrefixViolation
from g4debug.tracers.prefix_cache.contents import Contents
from g4debug.tracers.prefix_cache.report import Case as PrefixCase
from g4debug.tracers.rank_divergence import report as rank_report
from g4debug.tracers.rank_divergence.check import Difference
from g4debug.tracers.spec_lifecycle import handed_on as h
from g4debug.tracers.spec_lifecycle import report as spec_report
from g4debug.tracers.spec_lifecycle.check import (
    Violation,
    check_accepted,
    check_allocated,
    check_batch_rows,
    check_bonus,
    check_cells,
    check_counts,
    check_embedding,
    check_owners,
    check_places,
    check_pool,
    check_positions,
    check_publish,
    check_published,
    check_rows,
    check_same_rows,
    check_slots,
    check_state,
    check_written,
)
from g4debug.tracers.spec_lifecycle.check_values import (
    SAMPLED,
    STALE,
    Rows,
    Verify,
    check_from_last,
    check_verify_input,
    check_verify_result,
)
from g4debug.tracers.spec_lifecycle.forward_inputs import BOOKS, DECODE, PREFILL
from g4debug.tracers.spec_lifecycle.hand_over import HandOver
from g4debug.trapping.trap import TrapError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
FAR = 10_000_000
UNKNOWN = "not known"


@dataclass(frozen=True)
class Cause:
    """One row.

    tells: words of this cause alone. broken: see above; for some it gives only kind and cause of
    the finding. also: words that CAUSE has, too, and other causes may have. never: words that it
    must not have.
    """

    check: str
    kind: str
    tells: str
    broken: Callable[[Any], Any]
    also: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


def later(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the function gives what still wants the first arguments: ``arm``, or ``it``."""
    return lambda *args, **kwargs: lambda *first: function(*first, *args, **kwargs)


def of(it: Any, value: Any) -> Any:
    """The value, or what it is for these requests."""
    return value(it) if callable(value) else value


@later
def page(it: Any, rid: str, column: int, pool: str = "full") -> int:
    return it.rig.page(rid, column, pool)


@later
def free_page(it: Any, pool: str, before: int = 0) -> int:
    """The last page of a pool that nobody holds, or one before it."""
    return int((~it.ledger.pools[pool].held[1:]).nonzero()[0][-1]) + 1 - before


def raised(call: Callable[[], Any]) -> Any:
    with pytest.raises(TrapError) as error:
        call()
    return error.value.finding


# --- page-table: a decode of b (row 1), on SGLang's real pools and backend ------------------------


@later
def table(arm: Any, *steps: Any, full: bool = False) -> Any:
    """The finding of a decode. full: only the full layers run.

    steps: one that returns a function returns a change for the metadata when they are made.
    """
    arm(G4DEBUG_TRACE="page-table")
    it = Serving()
    spoils = [spoil for step in steps if (spoil := step(it)) is not None]
    batch = it.rig.batch("decode", it.rig.requests[1:], it.backend)
    it.backend.init_forward_metadata(batch)
    for spoil in spoils:
        spoil(it.backend.forward_metadata)
    layers = [x for x in it.rig.layers if not (full and LAYERS[x.layer_id])]
    return raised(lambda: it.rig.forward(it.backend, batch, layers, save=False))


@later
def cell(it: Any, value: Any, name: str = "page_table") -> Any:
    """Another page in b's newest cell, column 6."""
    found = of(it, value)

    def spoil(metadata: Any) -> None:
        getattr(metadata, name)[1, 6] = found

    return spoil


@later
def token(it: Any, value: Any) -> Any:
    """Another place in b's row of req_to_token, for column 6."""
    it.row("b")[6 * PAGE : 7 * PAGE] = of(it, value)


@later
def names(it: Any, column: int, value: Any) -> None:
    """b's row of req_to_token names another page in that column."""
    it.write("b", column, of(it, value))


@later
def mapped(it: Any, value: Any) -> Any:
    """The mapping of b's newest page says another SWA page, behind everybody's back."""
    swa = of(it, value)
    tokens = torch.arange(PAGE) + swa * PAGE if swa else torch.zeros(PAGE, dtype=torch.int64)
    begin = it.rig.page("b", 6) * PAGE
    it.rig.allocator.full_to_swa_index_mapping[begin : begin + PAGE] = tokens


@later
def allocated(it: Any, tokens: int | None) -> None:
    it.requests["b"].put(kv_allocated_len=tokens)


def narrow(it: Any) -> Any:
    def spoil(metadata: Any) -> None:
        metadata.page_table = metadata.page_table[:, :6].contiguous()

    return spoil


@later
def frees(it: Any, rid: str, begin: int, end: int, by: str = "tidy_up", swa: bool = False) -> Any:
    """These tokens of a request are freed, in a function of that name."""
    free = it.rig.allocator.free_swa if swa else it.rig.allocator.free
    called("plugin.py", by, free, it_row(it, it.requests[rid], end)[begin:])


def called(file: str, function: str, call: Callable[[Any], Any], argument: Any) -> None:
    """Call it from a function of that name in a file of that name."""
    code: dict[str, Any] = {}
    text = f"def {function}(call, argument):\n    call(argument)\n"
    exec(compile(text, f"/somewhere/{file}", "exec"), code)
    code[function](call, argument)


@later
def evicted_by(it: Any, file: str, function: str) -> None:
    """b's newest SWA page is evicted."""
    tokens = it_row(it, it.requests["b"], 100)[6 * PAGE :]
    called(file, function, it.rig.allocator.free_swa, tokens)


def beyond(it: Any) -> int:
    """The first place that the full pool does not have."""
    return int(it.ledger.pools["full"].pages * PAGE)


def nothing_was_handed_out(it: Any) -> None:
    it.ledger.pools["full"].owner[it.rig.page("b", 5)] = ""


def nothing_was_handed_out_at_the_end(it: Any) -> None:
    it.ledger.pools["full"].owner[it.rig.page("b", 6)] = ""


@later
def swapped(it: Any, one: int, other: int) -> None:
    """Two columns of b's row are swapped."""
    pages = it.rig.page("b", one), it.rig.page("b", other)
    it.write("b", one, pages[1])
    it.write("b", other, pages[0])


def a_row_names_a_page_that_another_one_lost(it: Any) -> None:
    lost = it.rig.page("a", 1)
    it.rig.allocator.free(it_row(it, it.requests["a"], 2 * PAGE)[PAGE:])
    it.rig.requests.pop(1)  # a does not run
    plugin.in_force.recorder._rids.pop(row_of(it.requests["a"]))
    it.write("b", 6, lost)


def the_backend_forgot_its_pool(arm: Any) -> Any:
    faults = {"G4DEBUG_FAULTS": "stale-swa-state=on", "G4DEBUG_FIX_SWA_STATE_SWAP": "0"}
    arm(G4DEBUG_TRACE="page-table", **faults)
    it = Serving()
    draft = it.rig.backend(draft=True)
    worker = draft_worker(it.rig, draft)
    batch = it.rig.batch("decode", it.rig.requests[2:3], draft, pool=dummy_pool())
    worker._init_frozen_kv_metadata(batch)
    with worker._target_kv_pool_view(batch):
        return raised(lambda: it.rig.forward(draft, batch, save=False))


@later
def record(arm: Any, kind: int, row: int) -> Any:
    """What the guard has left is of that kind and row."""
    zeros = trap_buffer.Record(*[0] * len(trap_buffer.Record._fields))
    words = zeros._replace(kind=kind, row=row)
    left = trap_buffer.Left(1, False, 1, words, trap_buffer.NO_CELLS)
    return table_report.describe(None, cell_of(words), left, Recorder(4), False, None)[0]


@later
def beside(arm: Any, mode: str, field: str, value: int) -> Any:
    """A word beside the entries of triton's lists.

    Words of another batch and overwritten words look the same there.
    """
    arm(G4DEBUG_TRACE="page-table")
    rig = TritonRig()
    backend, batch = prepared(rig, mode)
    getattr(backend.forward_metadata, field)[1] = value
    return raised(lambda: run(rig, backend, batch))


TABLE_WRONG = "the table is wrong, not the data it is built from"
ROW_WRONG = "req_to_token is wrong"
MAPPING_WRONG = "full_to_swa_index_mapping is wrong"
B5, SWA_B5 = page("b", 5), page("b", 5, "swa")
at_table = partial(Cause, "page-table")
# fmt: off
PAGE_TABLE = (
    at_table("negative", TABLE_WRONG, table(cell(-1))),
    at_table("negative", ROW_WRONG, table(token(-PAGE), full=True)),
    at_table("out-of-range", TABLE_WRONG, table(cell(FAR))),
    at_table("out-of-range", ROW_WRONG, table(token(beyond), full=True)),
    at_table("row-too-short", "the table is too narrow", table(narrow, full=True)),
    at_table("row-too-short", "the length is wrong", table(allocated(90), narrow, full=True)),
    at_table("row-too-short", "which of the two is not known",
        table(allocated(None), narrow, full=True)),
    at_table("page-zero", TABLE_WRONG, table(cell(0))),
    at_table("page-zero", MAPPING_WRONG, table(mapped(0))),
    at_table("mismatch", "of column 5", table(cell(B5))),
    at_table("mismatch", MAPPING_WRONG, table(mapped(SWA_B5))),
    at_table("mismatch", "has no token there", table(token(0), cell(B5), full=True)),
    at_table("other-request", TABLE_WRONG, table(cell(page("a", 3)))),
    at_table("other-request", MAPPING_WRONG, table(mapped(page("a", 3, "swa")))),
    at_table("stale", TABLE_WRONG, table(cell(free_page("full")))),
    at_table("stale", MAPPING_WRONG, table(mapped(free_page("swa")))),
    at_table("use-after-free", "while the request is still being served",
        table(frees("b", 6 * PAGE, 100))),
    at_table("use-after-free", "of which the ledger knows no hand-out",
        table(names(6, free_page("full")))),
    at_table("use-after-free", "was handed out for these tokens and is still held",
        table(a_row_names_a_page_that_another_one_lost)),
    at_table("use-after-free", "not for this request",
        table(nothing_was_handed_out_at_the_end, a_row_names_a_page_that_another_one_lost)),
    at_table("evicted-in-window", "the request's own eviction went too far",
        table(evicted_by("schedule_batch.py", "_evict_swa"))),
    at_table("evicted-in-window", "the prefix cache gave it up",
        table(evicted_by("swa_radix_cache.py", "evict"))),
    at_table("evicted-in-window", "why that caller evicts is not known",
        table(evicted_by("plugin.py", "tidy_up"))),
    at_table("full-index-in-swa-table", "although the backend translates its tables",
        table(cell(page("b", 6), "swa_page_table"))),
    at_table("full-index-in-swa-table", "_swa_kv_pool=None", the_backend_forgot_its_pool),
    at_table("foreign-page", "but the row does not name it", table(names(5, page("a", 1)))),
    at_table("foreign-page", "knows of no page that was handed out to this request",
        table(nothing_was_handed_out, names(5, page("a", 1)))),
    at_table("misplaced-page", "the row names it in column 2, too",
        table(names(5, page("b", 2)))),
    at_table("misplaced-page", "nothing that the allocator did was missed",
        table(swapped(2, 5))),
    at_table("unreadable", UNKNOWN, record(kind=0, row=0)),
    at_table("unreadable", UNKNOWN, record(kind=-(2**63), row=2**62)),
    *(
        at_table(kind, UNKNOWN, beside(mode, field, value))
        for kind, mode, field in (
            ("list-bounds", "decode", "kv_indptr"),
            ("kv-splits", "decode", "num_kv_splits"),
            ("window-offset", "target_verify", "window_kv_offsets"),
            ("mask-bounds", "target_verify", "mask_indptr"),
        )
        for value in (99, 10**6)
    ),
)
# fmt: on


# --- kv-allocator, on SGLang's real allocators ----------------------------------------------------


@later
def pools(arm: Any, *steps: Any, mode: str = "raise") -> Any:
    """The finding that the last step raises."""
    arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE=mode)
    it = Serving()
    for step in steps[:-1]:
        step(it)
    return raised(lambda: steps[-1](it))


@later
def poison(it: Any, *pages: Any) -> Any:
    """The full pool's free list begins with these pages."""
    inner = it.rig.allocator.full_attn_allocator
    found = torch.tensor([of(it, p) for p in pages])
    inner.free_pages = inner.free_pages.clone()
    inner.free_pages[: len(found)] = found


@later
def admits(it: Any, tokens: int = PAGE) -> None:
    it.admit("d", tokens, 0)


def tokens_of(page: int) -> torch.Tensor:
    return torch.arange(page * PAGE, (page + 1) * PAGE)


@later
def frees_page(it: Any, value: Any, pool: str = "") -> Any:
    """A page is freed; into one of the two inner pools, if it is named."""
    allocator = it.rig.allocator
    inner = getattr(allocator, f"{pool}_attn_allocator") if pool else allocator
    inner.free(tokens_of(of(it, value)))


def grows(it: Any) -> None:
    """One more token of b, as SGLang asks for it."""
    request = it.requests["b"]
    length = kv_of(request).kv_committed_len
    after = torch.tensor([length + 1])
    it.ledger.allocating = SimpleNamespace(reqs=[request], seq_lens_cpu=torch.tensor([length]))
    found = it.rig.allocator.alloc_decode(after, after, it.row("b")[length - 1 : length].long())
    it.row("b")[length] = int(found)
    kv_of(request).kv_committed_len += 1


def never_handed_out(it: Any) -> int:
    return int(it.rig.allocator.full_attn_allocator.free_pages[-1])


def page_zero_is_freed(it: Any) -> None:
    it.rig.allocator.free(torch.zeros(3, dtype=torch.int64))


def a_wrong_page_among_right_ones_is_freed(it: Any) -> None:
    tokens = torch.cat((it_row(it, it.requests["a"], PAGE), tokens_of(never_handed_out(it))))
    it.rig.allocator.free(tokens)


def twice_in_one_hand_out(it: Any) -> None:
    it.rig.allocator.free(it_row(it, it.requests["c"], 61))
    first = int(it.rig.allocator.full_attn_allocator.free_pages[0])
    poison(first, first)(it)
    it.admit("d", 2 * PAGE, 0)


def freed_twice_before(arm: Any) -> Any:
    folder = arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE="log")
    it = Serving()
    for _ in range(2):
        it.rig.allocator.full_attn_allocator.free(it_row(it, it.requests["a"], PAGE))
    it.admit("d", PAGE, 0)
    it.admit("e", PAGE, 0)
    found = [reading.read(p).finding for p in sorted(folder.glob("*.pt"))]
    (finding,) = [f for f in found if f.kind == "double-alloc"]
    return finding


def returned_by_the_outer_allocator(arm: Any) -> Any:
    """The SWA allocator returns a page that its full pool did not hand out."""
    outer = allocator_class("swa.init")
    real, instead = outer.alloc_extend, []

    def alloc_extend(allocator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = real(allocator, *args, **kwargs)
        return instead.pop() if instead else out

    def step(it: Any) -> None:
        instead.append(tokens_of(it.rig.page("a", 1)))
        it.admit("d", PAGE, 0)

    outer.alloc_extend = alloc_extend  # before the hooks are put around it
    try:
        return pools(step)(arm)
    finally:
        outer.alloc_extend = real


@later
def swa_pages_are(it: Any, value: Any) -> Any:
    """d is admitted while something stands between the SWA pool's allocator and the mapping."""
    inner = it.rig.allocator.swa_attn_allocator
    instead = tokens_of(of(it, value))
    real = type(inner).alloc_extend

    def alloc_extend(*args: Any, **kwargs: Any) -> torch.Tensor:
        real(inner, *args, **kwargs)
        return instead

    inner.alloc_extend = alloc_extend
    it.admit("d", PAGE, 0)


def doubled_by_the_outer_allocator(arm: Any) -> Any:
    """Two full pages get the same SWA page, and nothing was overwritten."""
    right = []

    def step(it: Any) -> None:
        right.append(it.rig.page("a", 1))
        swa_pages_are(page("a", 1, "swa"))(it)

    finding = pools(step)(arm)
    assert f"already belongs to full page {right[0]} (request a)" in finding.cause
    return finding


def maps_to_a_free_page(it: Any) -> None:
    full, swa = tokens_of(it.rig.page("b", 6)), tokens_of(free_page("swa")(it))
    it.rig.allocator.set_full_to_swa_mapping(full, swa)


@later
def releases(it: Any, rid: str, *others: Any) -> Any:
    """A request is released; others: (request, tokens) that are freed in place of its own."""
    running(it)
    release(it, rid, *(it_row(it, it.requests[r], n) for r, n in others))


def books() -> tuple[Ledger, PoolLedger]:
    """A ledger with a full pool of 40 pages, in which nothing has happened."""
    ledger = Ledger(Recorder(4))
    ledger.pools["full"] = pool = PoolLedger("full", 40, PAGE)
    return ledger, pool


@later
def entered(
    arm: Any, kind: str, event: str, page: int, before: Any = None, caller: str = "plugin.py:1 f"
) -> Any:
    """What the ledger alone says of an event of a page. before: what happened earlier."""
    ledger, pool = books()
    if before is not None:
        before(ledger, pool)
    at = PageEvent(1, event, "full", (page,), 1, "", caller)
    violation = allocator_check.Violation(kind, np.array([page]))
    said = allocator_causes.cause(ledger, pool, at, violation)
    return SimpleNamespace(kind=kind, cause=said)


def ever_held(ledger: Ledger, pool: PoolLedger) -> None:
    pool.ever[5] = True


def far_freed(ledger: Ledger, pool: PoolLedger) -> None:
    ledger.enter(pool, "free", np.array([99]), holds=False, caller="plugin.py:7 tidy_up")


at_pools = partial(Cause, "kv-allocator")
A_PAGE = ("a", 0, PAGE)
B_LAST = ("b", 6 * PAGE, 100)  # its newest page
LIST = "the list itself was overwritten"
NO_ALLOCATOR = "are from no allocator"
# fmt: off
ALLOCATORS = (
    at_pools("out-of-range", LIST, pools(poison(FAR), admits())),
    at_pools("out-of-range", NO_ALLOCATOR, pools(frees_page(FAR, "full"))),
    at_pools("out-of-range", "was freed into the free list before",
        entered("out-of-range", "extend", 99, far_freed)),
    at_pools("page-zero", LIST, pools(poison(0), admits())),
    at_pools("page-zero", NO_ALLOCATOR, pools(page_zero_is_freed)),
    at_pools("double-alloc", "the page was in the free list, although it is held",
        pools(poison(page("a", 1)), admits())),
    at_pools("double-alloc", "the page was freed twice", freed_twice_before),
    at_pools("double-alloc", "twice in this one hand-out", pools(twice_in_one_hand_out)),
    at_pools("double-alloc", "returned this one instead", returned_by_the_outer_allocator),
    at_pools("double-free", "the same code freed the page before",
        pools(frees(*A_PAGE), frees(*A_PAGE))),
    at_pools("double-free", "two places think that they have to give it back",
        pools(frees(*A_PAGE), frees(*A_PAGE, by="sweep"))),
    at_pools("double-free", "the first free is older",
        entered("double-free", "free", 5, ever_held)),
    at_pools("free-unallocated", "the index is from no allocator",
        pools(frees_page(never_handed_out))),
    at_pools("free-unallocated", "a wrong index is among its right ones",
        pools(a_wrong_page_among_right_ones_is_freed)),
    at_pools("use-after-free", "while the sequence still uses it", pools(frees(*B_LAST), grows)),
    at_pools("use-after-free", "its SWA page was taken away",
        pools(frees(*B_LAST, swa=True), grows)),
    at_pools("use-after-free", "no hand-out and no free of this page was recorded",
        pools(names(6, free_page("full")), grows)),
    at_pools("mapping-mismatch", "the mapping was wrong as soon as",
        pools(swa_pages_are(free_page("swa", before=1)))),
    at_pools("mapping-mismatch", "what wraps it did. SWA page",
        doubled_by_the_outer_allocator,
        also=("the mapping was wrong as soon as",),
        never=("overwritten",)),
    at_pools("mapping-mismatch", "the mapping was right when the page was handed out",
        pools(mapped(SWA_B5), grows)),
    at_pools("mapping-mismatch", "the mapping was right when the pages were handed out",
        pools(mapped(SWA_B5), frees(*B_LAST, swa=True))),
    at_pools("maps-freed", "without free_swa, which clears the mapping",
        pools(frees_page(page("b", 6, "swa"), "swa"))),
    at_pools("maps-freed", "set_full_to_swa_mapping was given SWA page",
        pools(maps_to_a_free_page)),
    at_pools("evicted-in-window", "the request's own eviction went too far",
        entered("evicted-in-window", "evict", 5, caller="schedule_batch.py:2744 _evict_swa")),
    at_pools("evicted-in-window", "the prefix cache gave it up",
        entered("evicted-in-window", "evict", 5, caller="swa_radix_cache.py:580 evict")),
    at_pools("foreign-free", "of its row", pools(names(5, page("a", 1)), releases("b"))),
    at_pools("foreign-free", "freed other indices than those of the row",
        pools(releases("b", ("a", 50)))),
    at_pools("freed-while-read", "gave a node of the prefix cache new pages",
        entered("freed-while-read", "free", 5, caller="swa_radix_cache.py:1139 _insert_helper")),
    at_pools("freed-while-read", "which of the two is not known",
        entered("freed-while-read", "free", 5, caller="swa_radix_cache.py:580 evict")),
)
# fmt: on

# --- pool-leak: a census of a pool that has the pages 1..5 ----------------------------------------


def happened(*events: tuple[str, int], request: str = "a") -> Ledger:
    """A ledger in which page 5 was handed out to a request, and then this happened."""
    ledger, pool = books()
    page = np.array([5])
    ledger.enter(pool, "extend", page, holds=True, request=request, caller="common.py:441 alloc")
    for kind, bad in events:
        ledger.enter(pool, kind, np.array([bad]), holds=False, caller="plugin.py:7 tidy_up")
    return ledger


@later
def census(
    arm: Any,
    free: tuple[int, ...],
    *events: tuple[str, int],
    owned: tuple[int, ...] = (),
    live: tuple[str, ...] = (),
    released: Any = None,
    request: str = "a",
    shared: tuple[int, ...] = (),
) -> Any:
    """free, owned: the pages that are. events: what happened to which page. live: requests."""
    found = take_census(6, np.array(free), np.array(owned, dtype=np.int64), shared=np.array(shared))
    requests = [Request(rid=rid) for rid in live]
    ledger = happened(*events, request=request)
    return leak_report.describe("full", found, requests, released or {}, ledger, True)[0]


@later
def row_kept(arm: Any, **released: tuple[int, bool]) -> Any:
    request = Request(rid="a", req_pool_idx=3, kv_allocated_len=50)
    return leak_report.describe_rows([request], released, happened())[0]


at_census = partial(Cause, "pool-leak")
ALL = (1, 2, 3, 4, 5)
LOST = (1, 2, 3, 4)
FREED = ("free", 5)
# fmt: off
LEAKS = (
    at_census("leaked", "release_kv_cache in step 7", census(LOST, released={"a": (7, False)})),
    at_census("leaked", "no call of it was seen", census(LOST)),
    at_census("leaked", "which is still live", census(LOST, live=("a",))),
    at_census("leaked", UNKNOWN, census(LOST, request="")),
    at_census("double", "while somebody still uses it", census(ALL, FREED, owned=(5,))),
    at_census("double", "no free of the page was recorded since it was handed out",
        census(ALL, owned=(5,))),
    at_census("repeated", "the page was freed twice", census((*ALL, 5), FREED, FREED)),
    at_census("repeated", "no second free of the page was recorded", census((*ALL, 5), FREED)),
    at_census("outside", "no page of this pool was freed in step",
        census((*ALL, 99), FREED, ("free", 99))),
    at_census("outside", "no free of this index was recorded", census((*ALL, 99), FREED)),
    at_census("row", "did not reach ReqToTokenPool.free", row_kept(a=(7, True))),
    at_census("row", "it was dropped without being released", row_kept()),
)
# fmt: on


def slots(*pages: int) -> np.ndarray[Any, Any]:
    """The slots of these pages, in order."""
    return (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


MINE, OTHERS = np.uint64(11), np.uint64(22)  # digests of this request's tokens, and of others


def handed(
    events: tuple[tuple[str, int], ...] = (),
    pages: tuple[int, ...] = (4, 5),
    held: tuple[tuple[int, str], ...] = ((4, "a"),),
    cached: tuple[tuple[int, str], ...] = (),
    moved: int = -1,
) -> tuple[Ledger, Contents, Any]:
    """Request a hands its pages to the prefix cache; the finding about it.

    Page 5 was handed out to it. held: other pages, and who has them. cached: pages with the KV of
    other tokens, and who handed them over. moved: the token that page 5 was handed out for.
    """
    ledger, contents = happened(*events), Contents(40)
    pool = ledger.pools["full"]
    for page, request in held:
        ledger.enter(pool, "extend", np.array([page]), holds=True, request=request)
    pool.position[5] = moved
    for page, request in cached:
        contents.put(np.array([page]), np.array([OTHERS]), request, 3)
    known = Known(pool.held, pool.owner, pool.position)
    digests = np.full(len(pages), MINE)
    given = np.array(pages)
    found = handed_over(given, digests, contents, known, "a", lent=0, size=PAGE, placed=True)
    return ledger, contents, found


def told_of(ledger: Ledger, contents: Contents, found: Any, node: Any = None) -> Any:
    assert found is not None
    tree, digests = SimpleNamespace(page_size=PAGE), np.array([MINE])
    case = PrefixCase(ledger, tree, found, "a", digests, contents, node)
    return prefix_report.describe(case)[0]


@later
def gets(arm: Any, *args: Any, **kwargs: Any) -> Any:
    """The finding about what the prefix cache gets."""
    return told_of(*handed(*args, **kwargs))


@later
def gets_slots(arm: Any, *given: int) -> Any:
    """The same for slots that do not make whole pages, of a pool of 40 pages."""
    found = whole_pages(np.array(given), PAGE, 40)
    return told_of(happened(), Contents(40), found)


@later
def hands_too_much(arm: Any, tokens: int) -> Any:
    found = PrefixViolation("beyond", 0, -1, f"{tokens} tokens, of which 16 have KV")
    return told_of(happened(), Contents(40), found)


@later
def counts_as_cached(arm: Any, lent: int, held: int) -> Any:
    got = f"cache_protected_len = {lent}, and its last node ends at token {held}"
    return told_of(happened(), Contents(40), PrefixViolation("protected", 0, -1, got))


@later
def has_another_key(arm: Any, got: str) -> Any:
    return told_of(happened(), Contents(40), PrefixViolation("other-key", 0, -1, got))


@later
def gives(arm: Any, *events: tuple[str, int], holds: str = "", short: bool = False) -> Any:
    """The finding about page 5, which a real node of the prefix cache gives to request a.

    holds: whoever handed the page over with the KV of other tokens, '' if it holds nothing. short:
    the node's value has fewer slots than its key has tokens.
    """
    from sglang.srt.mem_cache.radix_cache import TreeNode

    contents, top, node = Contents(40), TreeNode(), TreeNode()
    node.parent, node.key, node.value = top, range(PAGE), torch.from_numpy(slots(5))
    if holds:
        contents.put(np.array([5]), np.array([OTHERS]), holds, 3)
    found = handed_out(np.array([5]), np.array([MINE]), contents)
    if short:
        found = PrefixViolation("length", 0, -1, f"{PAGE - 1} slots for {PAGE} tokens")
    return told_of(happened(*events), contents, found, node)


@later
def lent(arm: Any, *events: tuple[str, int], row: int = 6, kv: tuple[int, ...] = ()) -> Any:
    """The finding about column 0 of request a's row, for which the prefix cache has page 5.

    row: the page that the row names. kv: the pages whose KV is of these tokens; others have it of
    other tokens.
    """
    ledger, contents = happened(*events), Contents(40)
    pool = ledger.pools["full"]
    if not events:
        ledger.enter(pool, "extend", np.array([6]), holds=True, request="b")
    for page in (5, 6):
        digest = MINE if page in kv else OTHERS
        contents.put(np.array([page]), np.array([digest]), "b", 3)
    return told_of(ledger, contents, PrefixViolation("lent-row", 0, row, "", 5))


@later
def free_rows(arm: Any, where: str, *rows: int) -> Any:
    holders = SimpleNamespace(row=lambda row, length: np.array([5]))
    found = leak_report.describe_free_rows("row-repeated", rows, where, holders, happened())
    return found[0]


@later
def miscounted(arm: Any, cached: int, evictable: int) -> Any:
    return leak_report.describe_miscounted(view(cached, evictable, 0), happened(), True)[0]


@later
def locked(arm: Any, *pages: int) -> Any:
    seen = view(64, 0, 64)
    return leak_report.describe_locked(seen, np.array(pages, dtype=np.int64), {}, happened())[0]


def view(cached: int, evictable: int, protected: int) -> View:
    none = np.empty(0, dtype=np.int64)
    sizes = Sizes(evictable, protected)
    return View("full", 40, none, none, none, none, none, cached, sizes)


at_cache = partial(Cause, "prefix-cache")
SHIFTED = slots(5) + 1
# fmt: off
CACHES = (
    at_census("shared", UNKNOWN, census(LOST, owned=(5,), shared=(5,))),
    at_census("shared", UNKNOWN, census(LOST, owned=(5,), shared=(5,), request="")),
    at_census("locked", UNKNOWN, locked(5)),
    at_census("locked", UNKNOWN, locked()),
    at_census("miscounted", UNKNOWN, miscounted(64, 48)),
    at_census("miscounted", UNKNOWN, miscounted(48, 64)),
    at_census("row-repeated", "ReqToTokenPool.free was called twice", free_rows("free rows", 3)),
    at_census("row-repeated", "own number of its row was wrong", free_rows("no rows", 0)),
    at_cache("beyond", UNKNOWN, hands_too_much(32)),
    at_cache("beyond", UNKNOWN, hands_too_much(17)),
    at_cache("protected", UNKNOWN, counts_as_cached(64, 48)),
    at_cache("protected", UNKNOWN, counts_as_cached(-1, 48)),
    at_cache("other-key", UNKNOWN, has_another_key("token 1 of its key is not the request's")),
    at_cache("other-key", UNKNOWN, has_another_key("its key is in another namespace")),
    at_cache("no-page", UNKNOWN, gets_slots(*slots(0))),
    at_cache("no-page", UNKNOWN, gets_slots(*slots(40))),
    at_cache("no-page", UNKNOWN, gets_slots(*slots(-1))),
    at_cache("not-in-order", UNKNOWN, gets_slots(*SHIFTED)),
    at_cache("not-in-order", UNKNOWN, gets_slots(*slots(5)[::-1])),
    at_cache("twice", UNKNOWN, gets(pages=(5, 5))),
    at_cache("twice", UNKNOWN, gets(pages=(4, 5, 4))),
    at_cache("holds-other", "pages of one request are exchanged or shifted",
        gets(cached=((5, "a"),))),
    at_cache("holds-other", "a page of the prefix cache that it did not get from there",
        gets(cached=((5, "b"),))),
    at_cache("freed", "the page was freed in step", gets((FREED,))),
    at_cache("freed", "no free of the page was recorded", gets(pages=(5, 9))),
    at_cache("foreign", "names a page of request b", gets(pages=(5, 6), held=((6, "b"),))),
    at_cache("foreign", "names a page of request c", gets(pages=(5, 6), held=((6, "c"),))),
    at_cache("misplaced", UNKNOWN, gets(moved=0)),
    at_cache("misplaced", UNKNOWN, gets(moved=7 * PAGE)),
    at_cache("wrong-page", "pages of one request are exchanged or shifted", gives(holds="a")),
    at_cache("wrong-page", "a page that was never handed over for its tokens", gives(holds="b")),
    at_cache("freed-page", "the page was freed in step", gives(FREED)),
    at_cache("freed-page", "no free of the page was recorded", gives()),
    at_cache("lent-row", "of req_to_token was overwritten after the prefix cache had lent it",
        lent(kv=(5,)), never=("node",)),
    at_cache("lent-row", "the node's value was overwritten while the request had it locked",
        lent(kv=(6,)), never=("row",)),
    at_cache("lent-row", "is free (freed in step", lent(FREED, row=5)),
    at_cache("lent-row", "overwritten inside of the page", lent(row=5)),
    at_cache("lent-row", "or the node's value was; which of the two is not known", lent()),
    at_cache("length", UNKNOWN, gives(short=True)),
    at_cache("length", UNKNOWN, gives(FREED, short=True)),
)
# fmt: on

# --- spec-lifecycle, on what its checks return ----------------------------------------------------


@later
def hands_over(arm: Any, violation: Violation | None, site: str = "batch.merge") -> Any:
    """The finding about a hand-over."""
    assert violation is not None
    at = HandOver(site, "here", SimpleNamespace(forward_mode=None), ("a", "b"))
    return spec_report.describe(violation, at, Recorder(4))


def in_step(violation: Violation | None, site: str = "scheduler.run_batch") -> Any:
    return hands_over(violation, site)


def counts(kind: str, what: str, got: list[int]) -> Violation | None:
    return check_counts(kind, what, [10, 20], got)


def publish(**changes: Any) -> Violation | None:
    sound = {"decode": True, "verified": True, "times": 0, "own_lengths": True, "own_rows": True}
    return check_publish(**{**sound, **changes})


def states(got: str) -> Violation:
    expected = "those that were selected for the seed step"
    return Violation("stale-hidden-state", expected, got, what="hidden_states")


ROWS = Rows(["a", "b"], (0, 1))
last = partial(check_from_last, ROWS)


def verify_gets(**values: list[int]) -> Violation | None:
    """What two requests' verify gets, with two tokens for each."""
    sound = {"bonus": [7, 8], "drafted": [7, 1, 8, 2], "lens": [5, 9], "positions": [5, 6, 9, 10]}
    return check_verify_input(ROWS, Verify(2, 2, True), {**sound, "fed": [7, 1, 8, 2], **values})


def verify_leaves(**values: list[int]) -> Violation | None:
    """What it hands on: one token is accepted for the first, two for the second."""
    sound = {"drafted": [7, 1, 8, 2], "wanted": [3, 0, 2, 4], "kernel tokens": [3, 0, 2, 4]}
    sound |= {"kernel index": [0, -1, 2, 3], "kernel correct": [0, 1], "sample lens": [1, 2]}
    sound |= {"result lens": [1, 2], "result tokens": [3, 0, 2, 4], "result bonus": [3, 4]}
    return check_verify_result(ROWS, Verify(2, 2, True), {**sound, **values})


STILL_VERIFY = check_state("verify-input", "FrozenKVMTPVerifyInput", ("draft-input",))
NOTHING = check_state("idle", "NoneType", ("draft-input",))
ANOTHER = Violation("wrong-type", "the verify-input of this step", "another object")
bonus = partial(check_bonus, ["a", "b"], [7, 8], earlier=lambda i: [i + 1])
written = partial(check_written, "lengths", 3, "a")
pool = partial(check_pool, False, "TritonAttnBackend", wanted=4096, got=64)
embedding = partial(check_embedding, 256, table=512, vocabulary=512, rank=1, ranks=2)
at_step = partial(Cause, "spec-lifecycle")
# fmt: off
STEPS = (
    at_step("verify-input-left", UNKNOWN + ": no forward", hands_over(STILL_VERIFY)),
    at_step("verify-input-left", "the verify input of its own step", in_step(STILL_VERIFY)),
    at_step("spec-info-dropped", "lost between two steps", hands_over(NOTHING)),
    at_step("spec-info-dropped", "lost inside the worker's step",
        hands_over(NOTHING, "worker.verify")),
    at_step("spec-info-dropped", "lost when the step ended", in_step(NOTHING)),
    at_step("wrong-type", "of the right type, but is not the one", hands_over(ANOTHER)),
    at_step("wrong-type", "a stage was left out, or ran twice",
        hands_over(check_state("draft-extend-input", "X", ("draft-input",)))),
    at_step("wrong-shape", "2 rows too many", hands_over(check_rows({"topk_p": 4}, {"topk_p": 2}))),
    at_step("wrong-shape", "lacks 1 rows", hands_over(check_rows({"topk_p": 1}, {"topk_p": 2}))),
    at_step("wrong-shape", "was never set, or was dropped",
        hands_over(check_rows({"topk_p": -1}, {"topk_p": 2}))),
    at_step("accept-length", "counted too few tokens", hands_over(check_accepted([0, -1], 2, 3))),
    at_step("accept-length", "counted too many tokens", hands_over(check_accepted([9, 0], 2, 3))),
    at_step("accept-length", "another number of requests", hands_over(check_accepted([0], 2, 3))),
    at_step("seq-len", "counts 1 tokens whose KV is not committed",
        hands_over(counts("seq-len", "seq_lens", [11, 20]))),
    at_step("seq-len", "leaves out 2 tokens whose KV is committed",
        hands_over(counts("seq-len", "seq_lens", [10, 18]))),
    at_step("seq-len", "does not agree with the host's lists of prefixes and new tokens",
        hands_over(replace(counts("seq-len", "seq_lens", [11, 20]), rule=BOOKS))),
    at_step("seq-len", "of another number of requests",
        hands_over(counts("seq-len", "seq_lens", [10]))),
    at_step("bookkeeping", "by the processing of the verify's result",
        in_step(counts("bookkeeping", "spec_verify_ct", [10, 21]), "result.resolve")),
    at_step("bookkeeping", "by putting the tokens out",
        in_step(counts("bookkeeping", "output_ids", [10, 21]), "scheduler.stream_output")),
    at_step("stale-hidden-state", "overwritten in place",
        hands_over(states("a tensor that was written to since then"))),
    at_step("stale-hidden-state", "another tensor is in the place",
        hands_over(states("another tensor"))),
    at_step("stale-hidden-state", "dropped on the way", hands_over(states("None"))),
    at_step("stale-hidden-state", "the tensor of the step before",
        hands_over(states("those of the step before"))),
    at_step("future-row", "two requests that both live",
        in_step(check_owners([3, 3], ["a", "b"], [None, None]))),
    at_step("future-row", "were filtered, merged or put in order at different times",
        in_step(check_same_rows([3, 1], [1, 3]))),
    at_step("future-row", "nothing wrote the lengths of this request", in_step(written(None))),
    at_step("future-row", "written for another request in between", in_step(written(("b", 5)))),
    at_step("future-row", "the step ended without a stash",
        in_step(Violation("future-row", "x", "not stashed", what="not stashed"))),
    at_step("future-row", "the rows by which the worker's step was published",
        in_step(publish(own_rows=False))),
    at_step("publish-order", "before its verify had counted", in_step(publish(verified=False))),
    at_step("publish-order", "published, or the worker did so twice", in_step(publish(times=1))),
    at_step("publish-order", "is not the one that the verify made",
        in_step(publish(own_lengths=False))),
    at_step("publish-order", "did not call it", in_step(check_published(True))),
    at_step("bonus-token", "the token is the last token of request a",
        in_step(bonus(got=[7, 7]), "result.resolve")),
    at_step("bonus-token", "the request had this token before",
        in_step(bonus(got=[7, 2]), "result.resolve")),
    at_step("bonus-token", UNKNOWN + ": no request of the batch",
        in_step(bonus(got=[7, 5]), "result.resolve")),
    at_step("bonus-token", "bonus_tokens was changed between the end of the request's last step",
        in_step(last("bonus-token", h.LEFT_BONUS, h.BONUS, [7, 8], {"bonus": [7, 9]}),
                "result.resolve")),
    at_step("seq-len", "it is that of request b (row 1), so if that is no accident, rows were",
        in_step(last("seq-len", h.NEW_LENS, h.LENS, [5, 9], {"lens": [9, 5]}),
                "future.resolve_lens")),
    at_step("stale-hidden-state", "hidden_states was changed between the end of the request's last",
        in_step(last(STALE, h.LEFT_HIDDEN, h.HIDDEN, [5, 9], {"hidden": [9, 5]}),
                "result.resolve")),
    at_step("verify-input", "draft_token was changed between the beginning of the draft and",
        in_step(verify_gets(drafted=[7, 1, 9, 2]), "result.resolve")),
    at_step("verify-input", "does not follow from seq_lens and the place in the row",
        in_step(verify_gets(positions=[5, 6, 9, 9]), "result.resolve")),
    at_step("verify-input", "input_ids was changed between the end of the draft and the target's",
        in_step(verify_gets(fed=[7, 1, 8, 7]), "result.resolve")),
    at_step("verify-result", "does not follow from the target's choice",
        in_step(verify_leaves(**{"kernel tokens": [3, 0, 2, 3]}), "result.resolve")),
    at_step("verify-result", "accept_lens was changed between the end of the verify's sampling",
        in_step(verify_leaves(**{"result lens": [2, 2]}), "result.resolve")),
    at_step("sampled-token", "next_token_ids was changed between the end of the sampling and",
        in_step(ROWS.check(SAMPLED, (h.SAMPLED, [7, 8]), (h.FORWARDED, [8, 7])),
                "scheduler.stream_output")),
    at_step("sampled-token", "output_ids was changed between the end of the sampling and",
        in_step(ROWS.check(SAMPLED, (h.SAMPLED, [7, 8]), (h.OUTPUT, [7, 9])),
                "scheduler.stream_output")),
    at_step("forward-row", "the row of request a (row 0) there: rows were exchanged",
        in_step(check_batch_rows("ab", [3, 1], [3, 3], 5), "forward_batch.init_new")),
    at_step("forward-row", "the index was overwritten, or was never set",
        in_step(check_batch_rows("ab", [3, 1], [3, -1], 5), "forward_batch.init_new")),
    at_step("forward-row", UNKNOWN + ": no request of the batch has that row",
        in_step(check_batch_rows("ab", [3, 1], [3, 2], 5), "forward_batch.init_new")),
    at_step("forward-place", UNKNOWN,
        in_step(check_slots([3, 99], 65, 2), "forward_batch.init_new")),
    at_step("forward-place", UNKNOWN,
        in_step(check_slots([3, 4, 65], 65, 1), "forward_batch.init_new")),
    at_step("forward-place", UNKNOWN,
        in_step(check_cells(torch.tensor([[1, 99]]), [0], [2], 65), "forward_batch.init_new")),
    at_step("position", "does not follow from the end of the prefix and the place",
        in_step(check_positions([(4, 2)], [4, 6], [0], PREFILL), "forward_batch.init_new")),
    at_step("position", "does not follow from the host's length",
        in_step(check_positions([(4, 1)], [6], [0], DECODE), "forward_batch.init_new")),
    at_step("allocated-len", "the allocation for this step was left out",
        in_step(check_allocated([8], [5], "why"), "batch.prepare_for_decode")),
    at_step("allocated-len", "went further than was allocated ahead",
        in_step(check_allocated([8], [5], "why"), "result.resolve")),
    at_step("draft-embedding", "the rows of one tensor-parallel rank",
        in_step(embedding(256), "draft.bind_embedding")),
    at_step("draft-embedding", "not known: the table is no part of the target's",
        in_step(embedding(-1), "draft.bind_embedding")),
    at_step("draft-pool", "did not hand it on to the backend inside it",
        in_step(pool("its own"), "attn.hybrid_metadata")),
    at_step("draft-pool", "not known: that pool is neither",
        in_step(pool("another"), "attn.hybrid_metadata")),
    at_step("draft-places", "has to set them to None before its forward",
        in_step(check_places(146, 1, cleared=False), "worker.draft_forward")),
    at_step("draft-places", UNKNOWN + ": in this release",
        in_step(check_places(146, 1, cleared=True), "worker.draft_forward")),
)
# fmt: on

# --- kv-writes: a decode, on SGLang's real pools and backend --------------------------------------


@later
def writes(arm: Any, *steps: Any, sliding: bool = False) -> Any:
    """The finding of a decode in which ``step(it, batch)`` has changed something."""
    arm(**ARMED)
    it = Writing()

    def spoil(batch: Any) -> None:
        for step in steps:
            step(it, batch)

    layers = it.sliding_layers() if sliding else it.full_layers()
    return it.found("decode", spoil, layers)[0]


@later
def to_full(it: Any, batch: Any, value: Any, row: int = 0) -> None:
    """The newest token of a row (of a, if none is named) goes to another slot of the full pool."""
    put(row, of(it, value))(batch)


@later
def to_swa(it: Any, batch: Any, value: Any) -> None:
    """a's newest token goes to another slot of the SWA pool."""
    swa_loc(it)[0] = of(it, value)


@later
def names_slot(it: Any, batch: Any, value: Any) -> None:
    """a's row of req_to_token names another slot for its newest token."""
    it.row("a")[49] = of(it, value)


@later
def slot(it: Any, rid: str, position: int) -> int:
    return it.right(rid, position)


@later
def swa_slot(it: Any, rid: str, position: int) -> int:
    return int(it.rig.allocator.full_to_swa_index_mapping[it.right(rid, position)])


@later
def free_slot(it: Any, pool: str) -> int:
    allocator = getattr(it.rig.allocator, f"{pool}_attn_allocator")
    return next(p for p in allocator.free_pages.tolist() if p) * PAGE


def frees_what_is_written(it: Any, batch: Any) -> None:
    it.rig.allocator.free(batch.out_cache_loc[:1])


def checked(it: Any) -> Any:
    """What the tracer knows of a forward that it has checked."""
    it.forward("decode", None, it.full_layers())
    tracer = next(
        e.around.__self__
        for e in plugin.in_force.hooks._entries["attn.forward"]
        if e.owner == "kv-writes"
    )
    return next(iter(tracer.checks.values()))


def the_mapping_is_wrong(arm: Any) -> Any:
    """Behind the ledger's back; then it is asked which of the two is right."""
    arm(**ARMED)
    it = Writing()
    launch, place, right = checked(it), it.right("a", 49), swa_slot("a", 49)(it)
    launch.pool_name = "swa"
    it.rig.allocator.full_to_swa_index_mapping[place] = swa_slot("a", 33)(it)
    wrong = swa_slot("a", 49)(it)
    write = Write(0, 49, wrong, 50, 1, WriteKind.MISMATCH, right, -1, it.row_of("a"), place)
    return writes_report.describe(launch, write, plugin.in_force.recorder, it.ledger)[0]


@later
def location(arm: Any, kind: WriteKind, value: int) -> Any:
    """The words about a location of the first row; for kinds that only a GPU can have."""
    arm(**ARMED)
    it = Writing()
    write = Write(0, 49, value, 50, 1, kind, -1, -1, it.row_of("a"), value)
    launch = checked(it) if kind is not WriteKind.UNREADABLE else None
    return writes_report.describe(launch, write, plugin.in_force.recorder, it.ledger)[0]


@later
def foreign(it: Any, batch: Any, victim: str, owner: str) -> None:
    """The row of one request names a page of another one, and the location was made from it."""
    scheduled(it)
    last = TOKENS[victim] - 1
    it.row(victim)[last // PAGE * PAGE :][:PAGE] = tokens_of(it.rig.page(owner, 1))
    put(list(TOKENS).index(victim), it.right(victim, last))(batch)


@later
def cached(arm: Any, tokens: int) -> Any:
    """The prefix cache holds the beginning of a's row, and the prefill begins before its end."""
    arm(**ARMED)
    it = Writing(cached=tokens)
    scheduled(it, cached=it.row("a")[:tokens].tolist())
    return it.found("extend", None, it.full_layers())[0]


at_write = partial(Cause, "kv-writes")
NOT_THE_ROW = "ForwardBatch.out_cache_loc does not agree"
NOT_THE_MAPPING = "the sliding layers' locations do not agree"
# fmt: off
WRITES = (
    at_write("negative", NOT_THE_ROW, writes(to_full(-3))),
    at_write("negative", NOT_THE_MAPPING, writes(to_swa(-3), sliding=True)),
    at_write("out-of-range", NOT_THE_ROW, writes(to_full(FAR))),
    at_write("out-of-range", NOT_THE_MAPPING, writes(to_swa(FAR), sliding=True)),
    at_write("page-zero", NOT_THE_ROW, writes(to_full(2))),
    at_write("page-zero", NOT_THE_MAPPING, writes(to_swa(2), sliding=True)),
    at_write("other-request", NOT_THE_ROW, writes(to_full(slot("c", 30)))),
    at_write("other-request", NOT_THE_MAPPING, writes(to_swa(swa_slot("c", 59)), sliding=True)),
    at_write("stale", NOT_THE_ROW, writes(to_full(free_slot("full")))),
    at_write("stale", NOT_THE_MAPPING, writes(to_swa(free_slot("swa")), sliding=True)),
    at_write("mismatch", NOT_THE_ROW, writes(to_full(slot("a", 3)))),
    at_write("mismatch", "which was not handed out to this request",
        writes(names_slot(slot("c", 30)))),
    at_write("mismatch", MAPPING_WRONG, the_mapping_is_wrong),
    at_write("written-twice", NOT_THE_ROW, writes(to_full(slot("b", 99)))),
    at_write("written-twice", "two cells of req_to_token name one place",
        writes(names_slot(slot("b", 99)), to_full(slot("b", 99)))),
    at_write("use-after-free", "freed too early", writes(frees_what_is_written)),
    at_write("use-after-free", "never handed out",
        writes(names_slot(free_slot("full")), to_full(free_slot("full")))),
    at_write("padding-row", UNKNOWN, location(WriteKind.PADDING, 20)),
    at_write("padding-row", UNKNOWN, location(WriteKind.PADDING, 600)),
    at_write("unreadable", UNKNOWN, location(WriteKind.UNREADABLE, 20)),
    at_write("unreadable", UNKNOWN, location(WriteKind.UNREADABLE, 600)),
    at_write("foreign-page", UNKNOWN, writes(foreign("a", "c"))),
    at_write("foreign-page", UNKNOWN, writes(foreign("b", "a"))),
    at_write("cached-page", UNKNOWN, cached(48)),
    at_write("cached-page", UNKNOWN, cached(44)),
)
# fmt: on

# --- kv-integrity: the functions that name the cause ----------------------------------------------


@later
def data(arm: Any, kind: str, cause: Callable[..., str], *arguments: Any) -> Any:
    return SimpleNamespace(kind=kind, cause=cause(*arguments))


wrote = partial(
    data,
    "write-after-free",
    kv_causes.cause_of_write,
    PageEvent(1, "free", "full", (5,), 1, "", "plugin.py:1 f"),
)
changed = partial(data, "kv-changed", kv_causes.cause_of_change)
nan = partial(data, "nan", kv_causes.cause_of_nan)
at_data = partial(Cause, "kv-integrity")
ALSO = "it is also in the row of b (column 3)"
# fmt: off
DATA = (
    at_data("write-after-free", "the page was freed too early", wrote(ALSO)),
    at_data("write-after-free", "no live request has the page in its row", wrote("")),
    at_data("kv-changed", "only one buffer of one layer changed", changed(1, "")),
    at_data("kv-changed", "another request wrote into the page", changed(8, ALSO)),
    at_data("kv-changed", "who it was is not known", changed(8, "")),
    at_data("nan", "only one row of one buffer", nan(3, "full", False, 1)),
    at_data("nan", "the first layer of the full pool has it already", nan(2, "full", True, 30)),
    at_data("nan", "the layers of this pool before it are finite", nan(3, "full", False, 30)),
)
# fmt: on

# --- flight-recorder: its evidence is what others reported before, and what CUDA printed ----------


def context(*reported: str) -> Any:
    settings = Settings(mode="log", hang_seconds=60, starved_steps=9)
    others = SimpleNamespace(memory=None)
    trap = SimpleNamespace(reported=list(reported), doubted={}, others=others)
    return SimpleNamespace(settings=settings, trap=trap, recorder=Recorder(4))


@later
def died(arm: Any, text: str, *reported: str, asserted: Asserted | None = None) -> Any:
    """The process ends by an exception with that text."""
    error, at = RuntimeError(text), context(*reported)
    return flight_report.of_exception(
        error, "scheduler.run_batch", at, True, lambda cuda: [], asserted
    )


@later
def hung(arm: Any, *reported: str) -> Any:
    hang = SimpleNamespace(what="a step", seconds=90.0)
    return flight_report.of_hang(hang, "SIGTERM", context(*reported), True)


@later
def works(arm: Any, *reported: str) -> Any:
    """It stands because it compiles."""
    hang = SimpleNamespace(what="a step", seconds=90.0)
    return flight_report.of_busy(hang, "compiling kernels", "SIGTERM", context(*reported))


@later
def stands(arm: Any, verdict: str, like: str = "") -> Any:
    """A loop that turns and serves nobody."""
    hang = SimpleNamespace(what="the event loop runs", seconds=90.0)
    reason = Reason("SWA pool: needs 2", verdict=verdict, like=like)
    return flight_report.of_standing(hang, [(waiting(), 90.0, reason)], context())


@later
def starves(arm: Any, verdict: str = "", overtaken: bool = False) -> Any:
    reason = Reason("SWA pool: needs 2", verdict=verdict)
    return flight_report.of_starved(9, 90.0, [(waiting(overtaken), 90.0, reason)], context())


def waiting(overtaken: bool = False) -> Wait:
    request = SimpleNamespace(rid="r")
    return Wait(request, Place.QUEUE, 0, 0.0, 0, 0, overtaken=overtaken)


@later
def asked(arm: Any, *reported: str) -> Any:
    return flight_report.of_asking(context(*reported))


@later
def other_rank(arm: Any, dump: str) -> Any:
    """Another rank stopped, and left a dump or none."""
    stop = Stop("page-table", "stale", "g4debug: page-table: page 9", dump)
    first = Seat(1, 4711, STOPPED, 0, 1, 0, -1, 1, stop)
    return flight_report.of_other_rank(first, None, context())


@later
def asserts(arm: Any, rows: int) -> Any:
    """A device assert. The host knows the ids that go into a table of so many rows."""
    embedding = Lookup("the draft's table", "a.py", "ids", ("embedding",), rows, 0, 511)
    said = Asserted((), lookups.judge((embedding,), ()))
    return died("CUDA error: device-side assert triggered", asserted=said)(arm)


@later
def killed(arm: Any, here: int = 0, host: int = 0, **end: int) -> Any:
    """The black box of a process that ended so, while the OOM killer has killed so many."""
    owner = Owner(4711, 4700, 1, 10**18, "node", "launch", "/dumps")
    about = json.dumps({"location": {}, "oom_kills": {"/cgroup": 0, "host": 0}}).encode()
    content = Content(owner, 0, "", {"about": about}, [], [], 0, [], 0)
    now = {"/cgroup": here, "host": here + host}
    with mock.patch.object(process_end, "oom_kills", return_value=now):
        return box_dumps.record_of(content, Maker("list", End(**end))).finding


at_end = partial(Cause, "flight-recorder")
BEFORE = "this finding did not stop the server"
NOBODY = "not known: no tracer reported anything before"
EARLIER = "g4debug: page-table: page 99"
ILLEGAL = "CUDA error: an illegal memory access"
OUTSIDE = "It comes from outside of the process"
OOM = "OOM killer has killed"
# fmt: off
ENDS = (
    at_end("cuda-error", BEFORE, died(ILLEGAL, EARLIER)),
    at_end("cuda-error", NOBODY, died(ILLEGAL)),
    at_end("exception", BEFORE, died("boom", EARLIER)),
    at_end("exception", NOBODY, died("boom")),
    at_end("hang", BEFORE, hung(EARLIER)),
    at_end("hang", NOBODY, hung()),
    at_end("hang", "as sglang #36458", stands("A deadlock.", PARKED)),
    at_end("hang", "as sglang #32379", stands("A deadlock.", OWN_PREFIX)),
    at_end("starved", "requests that came later are served", starves(overtaken=True)),
    at_end("starved", "requests run that may free it", starves("requests run that may free it.")),
    at_end("busy", BEFORE, works(EARLIER)),
    at_end("busy", "it was compiling kernels", works()),
    at_end("asked", BEFORE, asked(EARLIER)),
    at_end("asked", "nothing is wrong, as far as the tracers tell", asked()),
    at_end("other-rank", "its dump: /dumps/a.pt", other_rank("/dumps/a.pt")),
    at_end("other-rank", "it has left no dump", other_rank("")),
    at_end("killed", OUTSIDE, killed(signal=9), never=(OOM,)),
    at_end("killed", f"{OOM} 2 processes of this host", killed(signal=9, host=2), also=(OUTSIDE,)),
    at_end("oom-killed", f"{OOM} 1 process of its cgroup", killed(signal=9, here=1)),
    at_end("oom-killed", f"{OOM} 2 processes of its cgroup", killed(signal=9, here=2)),
    at_end("native-crash", "A library called abort()", killed(signal=6)),
    at_end("native-crash", "Code outside of Python failed", killed(signal=11)),
    at_end("gone", "It called exit() outside of the event loop", killed(code=3)),
    at_end("gone", "nobody was left to see it", killed()),
    at_end("device-assert", "only the draft's table (a.py) has indices that do not",
        asserts(rows=256)),
    at_end("device-assert", "no index is known that does not fit its table", asserts(rows=512)),
)
# fmt: on

# --- rank-divergence ------------------------------------------------------------------------------


@later
def differ(arm: Any, *fields: tuple[str, str, str]) -> Any:
    """Two ranks differ in these: (name, value here, value there)."""
    seat = Seat(1, 4711, ALIVE, 0, 1, 0, -1, 0, Stop())
    found = [Difference(*field) for field in fields]
    return rank_report.describe(9, "dp0/tp0/pp0", seat, found, "DECODE", 0)


at_rank = partial(Cause, "rank-divergence", "ranks-differ")
# fmt: off
RANKS = (
    at_rank("c is in the batch of dp0/tp1/pp0 only",
        differ(("requests", "a, b", "a, b, c"), ("sequence lengths", "5, 6", "5, 6, 7"))),
    at_rank("the same requests in another order", differ(("requests", "a, b", "b, a"))),
    at_rank("was aborted on one rank and not on the other",
        differ(("ending requests", "none", "b"))),
    at_rank("the ranks sampled different tokens",
        differ(("output tokens", "5 (checksum 1)", "5 (checksum 2)"))),
    at_rank("the prefix caches of the ranks hold different",
        differ(("prefix lengths", "128", "64"), ("extend lengths", "64", "128"))),
    at_rank("its KV is kept in other places", differ(("out_cache_loc", "64", "128"))),
    at_rank("something on one of the ranks decides by itself",
        differ(("sequence lengths", "5", "6"))),
)
# fmt: on

# --- and all of them ------------------------------------------------------------------------------

CAUSES = (*PAGE_TABLE, *ALLOCATORS, *LEAKS, *CACHES, *STEPS, *WRITES, *DATA, *ENDS, *RANKS)


def told(check: str, kind: str) -> list[str]:
    return [cause.tells for cause in CAUSES if (cause.check, cause.kind) == (check, kind)]


@pytest.mark.parametrize(
    ("check", "kind"), [(check, kind) for check, kinds in KINDS.items() for kind in kinds]
)
def test_every_kind_has_two_causes(check, kind):
    found = told(check, kind)
    assert len(found) >= 2, f"{check}: {kind} has {len(found)} causes in this file, and needs two"
    assert len(set(found)) == len(found) or set(found) == {UNKNOWN}


def test_no_cause_is_of_a_kind_that_is_gone():
    assert {c.kind for c in CAUSES if c.kind not in KINDS[c.check]} == set()


@pytest.mark.parametrize(
    "cause", [pytest.param(c, id=f"{c.check}: {c.kind}: {c.tells}") for c in CAUSES]
)
def test_a_cause_is_told_from_the_others(cause, arm):
    found = cause.broken(arm)
    assert found.kind == cause.kind
    for words in (cause.tells, *cause.also):
        assert words in found.cause
    for words in cause.never:
        assert words not in found.cause
    for other in told(cause.check, cause.kind):
        assert other in (cause.tells, *cause.also, UNKNOWN) or other not in found.cause, found.cause
    if hasattr(found, "headline"):
        assert found.check == cause.check
        assert says(KINDS[cause.check][cause.kind].says, found.headline), found.headline


def says(markdown: str, headline: str) -> bool:
    """The headline has one of the texts that TRIAGE.md gives for this kind; ``…`` is anything."""
    texts = re.findall(r"`([^`]+)`", markdown)
    return any(re.search(".*".join(map(re.escape, x.split("…"))), headline) for x in texts)
