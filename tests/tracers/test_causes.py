"""Each kind of finding names its cause: two scenarios with different causes must tell them apart.

A scenario makes what a tracer saw, and says which words the CAUSE must have. These are words of
that cause alone: the other scenario of the kind must not get them. Where the evidence does not
single out a cause, it must say "not known". The kinds are read off the tracers: one without
scenarios fails here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
from g4debug.findings.kinds import KINDS
from g4debug.findings.launch_memory import ALIVE, STOPPED, Seat, Stop
from g4debug.findings.record import Lookup, PageEvent
from g4debug.findings.steps import Recorder
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.sanitizer import trap_buffer
from g4debug.tracers.flight_recorder import lookups
from g4debug.tracers.flight_recorder import report as flight_report
from g4debug.tracers.flight_recorder.assert_evidence import Asserted
from g4debug.tracers.kv_allocator import causes as swa_causes
from g4debug.tracers.kv_allocator import check as swa_check
from g4debug.tracers.kv_integrity import causes as kv_causes
from g4debug.tracers.kv_writes import report as writes_report
from g4debug.tracers.kv_writes.check import Kind as WriteKind
from g4debug.tracers.kv_writes.checked_writes import Write
from g4debug.tracers.page_table import report as table_report
from g4debug.tracers.page_table.checked_table import cell_of
from g4debug.tracers.pool_leak import report as leak_report
from g4debug.tracers.pool_leak.check import take_census
from g4debug.tracers.rank_divergence import report as rank_report
from g4debug.tracers.rank_divergence.check import Difference
from g4debug.tracers.spec_lifecycle import check as spec_check
from g4debug.tracers.spec_lifecycle import hand_over
from g4debug.tracers.spec_lifecycle import report as spec_report
from g4debug.tracers.spec_lifecycle.check import Violation
from g4debug.trapping.trap import TrapError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
FAR = 10_000_000
UNKNOWN = "not known"
# arm -> (kind, cause)
Scenario = Callable[[Any], tuple[str, str]]
SCENARIOS: dict[str, list[tuple[str, Scenario]]] = {}


def scenario(kind: str, tells: str) -> Callable[[Scenario], Scenario]:
    """Declare a scenario of a kind ("check: kind"), and the words that its cause alone has."""

    def declare(function: Scenario) -> Scenario:
        SCENARIOS.setdefault(kind, []).append((tells, function))
        return function

    return declare


def kinds() -> list[str]:
    """Every kind of every tracer, as its report declares it."""
    return [f"{check}: {kind}" for check, kinds in KINDS.items() for kind in kinds]


# --- page-table, on SGLang's real pools and backend ---------------------------------------------

TABLE = {"G4DEBUG_TRACE": "page-table"}


def table(arm: Any, **environ: str) -> Any:
    arm(**TABLE, **environ)
    return Serving()


def seen(
    it: Any, spoil: Callable[[Any], None] | None = None, full: bool = False
) -> tuple[str, str]:
    """(kind, cause) of what a decode of b (row 1) runs into. full: only the full layers run."""
    batch = it.rig.batch("decode", it.rig.requests[1:], it.backend)
    it.backend.init_forward_metadata(batch)
    if spoil is not None:
        spoil(it.backend.forward_metadata)
    layers = [x for x in it.rig.layers if not (full and LAYERS[x.layer_id])]
    with pytest.raises(TrapError) as error:
        it.rig.forward(it.backend, batch, layers, save=False)
    return error.value.finding.kind, error.value.finding.cause


def in_table(value: int, pool: str = "page_table") -> Callable[[Any], None]:
    """Put a page into b's newest cell, column 6."""

    def spoil(metadata: Any) -> None:
        getattr(metadata, pool)[1, 6] = value

    return spoil


def map_to(it: Any, swa: int) -> None:
    """Let the mapping of b's newest page say another SWA page, behind everybody's back."""
    page = it.rig.page("b", 6)
    tokens = torch.arange(PAGE) + swa * PAGE if swa else torch.zeros(PAGE, dtype=torch.int64)
    it.rig.allocator.full_to_swa_index_mapping[page * PAGE : (page + 1) * PAGE] = tokens


TABLE_WRONG = "the table is wrong, not what it is built from"
ROW_WRONG = "req_to_token is wrong"
MAPPING_WRONG = "full_to_swa_index_mapping is wrong"


@scenario("page-table: negative", TABLE_WRONG)
def negative_in_the_table(arm):
    return seen(table(arm), in_table(-1))


@scenario("page-table: negative", ROW_WRONG)
def negative_in_the_row(arm):
    it = table(arm)
    it.row("b")[6 * PAGE : 7 * PAGE] = -PAGE
    return seen(it, full=True)


@scenario("page-table: out-of-range", TABLE_WRONG)
def far_in_the_table(arm):
    return seen(table(arm), in_table(FAR))


@scenario("page-table: out-of-range", ROW_WRONG)
def far_in_the_row(arm):
    it = table(arm)
    pages = it.ledger.pools["full"].pages
    it.row("b")[6 * PAGE : 7 * PAGE] = pages * PAGE
    return seen(it, full=True)


def narrow(metadata: Any) -> None:
    metadata.page_table = metadata.page_table[:, :6].contiguous()


@scenario("page-table: row-too-short", "the table is too narrow")
def a_narrow_table(arm):
    return seen(table(arm), narrow, full=True)


@scenario("page-table: row-too-short", "the length is wrong")
def a_length_that_nobody_allocated(arm):
    it = table(arm)
    it.requests["b"].put(kv_allocated_len=90)
    return seen(it, narrow, full=True)


@scenario("page-table: row-too-short", "which of the two is not known")
def a_request_that_is_not_known(arm):
    it = table(arm)
    it.requests["b"].put(kv_allocated_len=None)
    return seen(it, narrow, full=True)


@scenario("page-table: page-zero", TABLE_WRONG)
def zero_in_the_table(arm):
    return seen(table(arm), in_table(0))


@scenario("page-table: page-zero", MAPPING_WRONG)
def zero_in_the_mapping(arm):
    it = table(arm)
    map_to(it, 0)
    return seen(it)


@scenario("page-table: mismatch", "of column 5")
def another_column(arm):
    it = table(arm)
    return seen(it, in_table(it.rig.page("b", 5)))


@scenario("page-table: mismatch", MAPPING_WRONG)
def the_mapping_names_another_column(arm):
    it = table(arm)
    map_to(it, it.rig.page("b", 5, "swa"))
    return seen(it)


@scenario("page-table: mismatch", "has no token there")
def a_row_that_was_cleared(arm):
    it = table(arm)
    page = it.rig.page("b", 5)
    it.row("b")[6 * PAGE : 7 * PAGE] = 0
    return seen(it, in_table(page), full=True)


@scenario("page-table: other-request", TABLE_WRONG)
def anothers_page_in_the_table(arm):
    it = table(arm)
    return seen(it, in_table(it.rig.page("a", 3)))


@scenario("page-table: other-request", MAPPING_WRONG)
def the_mapping_names_anothers_page(arm):
    it = table(arm)
    map_to(it, it.rig.page("a", 3, "swa"))
    return seen(it)


def a_free_page(it: Any, pool: str) -> int:
    return int((~it.ledger.pools[pool].held[1:]).nonzero()[0][-1]) + 1


@scenario("page-table: stale", TABLE_WRONG)
def a_free_page_in_the_table(arm):
    it = table(arm)
    return seen(it, in_table(a_free_page(it, "full")))


@scenario("page-table: stale", MAPPING_WRONG)
def the_mapping_names_a_free_page(arm):
    it = table(arm)
    map_to(it, a_free_page(it, "swa"))
    return seen(it)


@scenario("page-table: use-after-free", "while the request is still being served")
def its_page_was_freed(arm):
    it = table(arm)
    it.rig.allocator.free(it_row(it, it.requests["b"], 100)[6 * PAGE :])
    return seen(it)


@scenario("page-table: use-after-free", "of which the ledger knows no hand-out")
def a_row_names_a_page_that_nobody_got(arm):
    it = table(arm)
    it.write("b", 6, a_free_page(it, "full"))
    return seen(it)


@scenario("page-table: use-after-free", "not for this request")
def a_row_names_a_page_that_another_one_lost(arm):
    it = table(arm)
    page = it.rig.page("a", 1)
    it.rig.allocator.free(it_row(it, it.requests["a"], 2 * PAGE)[PAGE:])
    it.rig.requests.pop(1)  # a does not run
    plugin.in_force.recorder._rids.pop(row_of(it.requests["a"]))
    it.write("b", 6, page)
    batch = it.rig.batch("decode", it.rig.requests[1:], it.backend)
    it.backend.init_forward_metadata(batch)
    with pytest.raises(TrapError) as error:
        it.rig.forward(it.backend, batch)
    return error.value.finding.kind, error.value.finding.cause


def evict(it: Any, file: str, function: str) -> None:
    """Evict b's newest SWA page from a function of that name in a file of that name."""
    code: dict[str, Any] = {}
    text = f"def {function}(free, tokens):\n    free(tokens)\n"
    exec(compile(text, f"/somewhere/{file}", "exec"), code)
    tokens = it_row(it, it.requests["b"], 100)[6 * PAGE :]
    code[function](it.rig.allocator.free_swa, tokens)


@scenario("page-table: evicted-in-window", "the request's own eviction went too far")
def evicted_by_the_scheduler(arm):
    it = table(arm)
    evict(it, "schedule_batch.py", "_evict_swa")
    return seen(it)


@scenario("page-table: evicted-in-window", "the prefix cache gave it up")
def evicted_by_the_prefix_cache(arm):
    it = table(arm)
    evict(it, "swa_radix_cache.py", "evict")
    return seen(it)


@scenario("page-table: evicted-in-window", "why that caller evicts is not known")
def evicted_by_a_stranger(arm):
    it = table(arm)
    evict(it, "plugin.py", "tidy_up")
    return seen(it)


@scenario("page-table: full-index-in-swa-table", "although the backend translates its tables")
def one_cell_was_not_translated(arm):
    it = table(arm)
    return seen(it, in_table(it.rig.page("b", 6), "swa_page_table"))


@scenario("page-table: full-index-in-swa-table", "_swa_kv_pool=None")
def the_backend_forgot_its_pool(arm):
    it = table(arm, G4DEBUG_FAULTS="stale-swa-state=on", G4DEBUG_FIX_SWA_STATE_SWAP="0")
    draft = it.rig.backend(draft=True)
    worker = draft_worker(it.rig, draft)
    batch = it.rig.batch("decode", it.rig.requests[2:3], draft, pool=dummy_pool())
    worker._init_frozen_kv_metadata(batch)
    with worker._target_kv_pool_view(batch), pytest.raises(TrapError) as error:
        it.rig.forward(draft, batch, save=False)
    return error.value.finding.kind, error.value.finding.cause


@scenario("page-table: foreign-page", "but the row does not name it")
def its_own_page_is_known(arm):
    it = table(arm)
    it.write("b", 5, it.rig.page("a", 1))
    return seen(it)


@scenario("page-table: foreign-page", "knows of no page that was handed out to this request")
def nothing_was_handed_out_to_it(arm):
    it = table(arm)
    it.ledger.pools["full"].owner[it.rig.page("b", 5)] = ""
    it.write("b", 5, it.rig.page("a", 1))
    return seen(it)


def bare(kind: int, row: int) -> tuple[str, str]:
    record = trap_buffer.Record(*[0] * len(trap_buffer.Record._fields))._replace(kind=kind, row=row)
    left = trap_buffer.Left(1, False, 1, record, trap_buffer.NO_CELLS)
    finding, _, _ = table_report.describe(None, cell_of(record), left, Recorder(4), False, None)
    return finding.kind, finding.cause


@scenario("page-table: unreadable", UNKNOWN)
def a_record_of_zeros(arm):
    return bare(0, 0)


@scenario("page-table: unreadable", UNKNOWN)
def a_record_of_anything(arm):
    return bare(-(2**63), 2**62)


# The words beside the entries of triton's lists. What is made for another batch and what is
# overwritten look the same there.


def in_words(arm: Any, mode: str, spoil: Callable[[Any], None]) -> tuple[str, str]:
    arm(**TABLE)
    rig = TritonRig()
    backend, batch = prepared(rig, mode)
    spoil(backend.forward_metadata)
    with pytest.raises(TrapError) as error:
        run(rig, backend, batch)
    return error.value.finding.kind, error.value.finding.cause


def put_word(field: str, row: int, value: int) -> Callable[[Any], None]:
    def spoil(metadata: Any) -> None:
        getattr(metadata, field)[row] = value

    return spoil


WORDS = {
    "list-bounds": ("decode", "kv_indptr"),
    "kv-splits": ("decode", "num_kv_splits"),
    "window-offset": ("target_verify", "window_kv_offsets"),
    "mask-bounds": ("target_verify", "mask_indptr"),
}
for _kind, (_mode, _field) in WORDS.items():
    for _value in (99, 10**6):

        def a_wrong_word(arm, mode=_mode, field=_field, value=_value):
            return in_words(arm, mode, put_word(field, 1, value))

        scenario(f"page-table: {_kind}", UNKNOWN)(a_wrong_word)


# --- kv-allocator, on SGLang's real allocators -------------------------------------------------


def pools(arm: Any, mode: str = "raise") -> Any:
    it_folder = arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE=mode)
    it = Serving()
    it.folder = it_folder
    return it


def stopped(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(TrapError) as error:
        call()
    return error.value.finding.kind, error.value.finding.cause


def dumped(it: Any, kind: str) -> tuple[str, str]:
    found = [reading.read(p).finding for p in sorted(it.folder.glob("*.pt"))]
    (finding,) = [f for f in found if f.kind == kind]
    return finding.kind, finding.cause


def poison(it: Any, *pages: int) -> None:
    inner = it.rig.allocator.full_attn_allocator
    inner.free_pages = inner.free_pages.clone()
    inner.free_pages[: len(pages)] = torch.tensor(pages)


def tokens_of(page: int) -> torch.Tensor:
    return torch.arange(page * PAGE, (page + 1) * PAGE)


@scenario("kv-allocator: out-of-range", "the list itself was overwritten")
def a_free_list_with_a_far_page(arm):
    it = pools(arm)
    poison(it, FAR)
    return stopped(lambda: it.admit("d", PAGE, 0))


@scenario("kv-allocator: out-of-range", "are from no allocator")
def a_far_index_is_freed(arm):
    it = pools(arm)
    return stopped(lambda: it.rig.allocator.full_attn_allocator.free(torch.tensor([FAR * PAGE])))


@scenario("kv-allocator: out-of-range", "was freed into the free list before")
def a_far_index_that_was_freed_is_handed_out(arm):
    ledger, pool = books()
    ledger.enter(pool, "free", np.array([99]), holds=False, caller="plugin.py:7 tidy_up")
    return judged(ledger, pool, "out-of-range", event("extend", 99), 99)


@scenario("kv-allocator: page-zero", "the list itself was overwritten")
def a_free_list_with_page_zero(arm):
    it = pools(arm)
    poison(it, 0)
    return stopped(lambda: it.admit("d", PAGE, 0))


@scenario("kv-allocator: page-zero", "are from no allocator")
def page_zero_is_freed(arm):
    it = pools(arm)
    return stopped(lambda: it.rig.allocator.free(torch.zeros(3, dtype=torch.int64)))


@scenario("kv-allocator: double-alloc", "no free of the page was recorded since it was handed out")
def handed_out_twice_by_the_allocator(arm):
    """The issue's: a page that alloc_extend did not take from its free list."""
    it = pools(arm)
    poison(it, it.rig.page("a", 1))
    return stopped(lambda: it.admit("d", PAGE, 0))


@scenario("kv-allocator: double-alloc", "the page was freed twice")
def freed_twice_before(arm):
    it = pools(arm, "log")
    for _ in range(2):
        it.rig.allocator.full_attn_allocator.free(it_row(it, it.requests["a"], PAGE))
    it.admit("d", PAGE, 0)
    it.admit("e", PAGE, 0)
    return dumped(it, "double-alloc")


@scenario("kv-allocator: double-alloc", "twice in this one hand-out")
def twice_in_one_hand_out(arm):
    it = pools(arm)
    it.rig.allocator.free(it_row(it, it.requests["c"], 61))
    page = int(it.rig.allocator.full_attn_allocator.free_pages[0])
    poison(it, page, page)
    return stopped(lambda: it.admit("d", 2 * PAGE, 0))


@scenario("kv-allocator: double-alloc", "returned this one instead")
def returned_by_the_outer_allocator(arm):
    """The issue's: the SWA allocator returns a page that its full pool did not hand out."""
    outer = allocator_class("swa.init")
    real, instead = outer.alloc_extend, []

    def alloc_extend(allocator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = real(allocator, *args, **kwargs)
        return instead.pop() if instead else out

    outer.alloc_extend = alloc_extend  # before the hooks are put around it
    try:
        it = pools(arm)
        instead.append(tokens_of(it.rig.page("a", 1)))
        return stopped(lambda: it.admit("d", PAGE, 0))
    finally:
        outer.alloc_extend = real


@scenario("kv-allocator: double-free", "the same code freed the page before")
def the_same_line_frees_twice(arm):
    it = pools(arm)
    tokens = it_row(it, it.requests["a"], PAGE)

    def twice() -> None:
        for _ in range(2):
            it.rig.allocator.free(tokens)

    return stopped(twice)


@scenario("kv-allocator: double-free", "two places think that they have to give it back")
def two_lines_free(arm):
    it = pools(arm)
    tokens = it_row(it, it.requests["a"], PAGE)
    it.rig.allocator.free(tokens)
    return stopped(lambda: it.rig.allocator.free(tokens))


@scenario("kv-allocator: double-free", "the first free is older")
def a_free_that_is_not_recorded_any_more(arm):
    ledger, pool = books()
    pool.ever[5] = True
    return judged(ledger, pool, "double-free", event("free", 5), 5)


@scenario("kv-allocator: free-unallocated", "the index is from no allocator")
def a_page_that_nobody_got_is_freed(arm):
    it = pools(arm)
    page = int(it.rig.allocator.full_attn_allocator.free_pages[-1])
    return stopped(lambda: it.rig.allocator.free(tokens_of(page)))


@scenario("kv-allocator: free-unallocated", "a wrong index is among its right ones")
def a_wrong_page_among_right_ones_is_freed(arm):
    it = pools(arm)
    page = int(it.rig.allocator.full_attn_allocator.free_pages[-1])
    tokens = torch.cat((it_row(it, it.requests["a"], PAGE), tokens_of(page)))
    return stopped(lambda: it.rig.allocator.free(tokens))


def grow(it: Any, rid: str, by: int = 1) -> None:
    """One more token of a request, as SGLang asks for it."""
    request = it.requests[rid]
    length = kv_of(request).kv_committed_len
    after = torch.tensor([length + by])
    it.ledger.allocating = SimpleNamespace(reqs=[request], seq_lens_cpu=torch.tensor([length]))
    found = it.rig.allocator.alloc_decode(after, after, it.row(rid)[length - 1 : length].long())
    it.row(rid)[length] = int(found)
    kv_of(request).kv_committed_len += by


@scenario("kv-allocator: use-after-free", "while the sequence still uses it")
def a_sequence_goes_on_in_a_freed_page(arm):
    it = pools(arm)
    it.rig.allocator.free(it_row(it, it.requests["b"], 100)[6 * PAGE :])
    return stopped(lambda: grow(it, "b"))


@scenario("kv-allocator: use-after-free", "its SWA page was taken away")
def a_sequence_goes_on_behind_an_eviction(arm):
    it = pools(arm)
    it.rig.allocator.free_swa(it_row(it, it.requests["b"], 100)[6 * PAGE :])
    return stopped(lambda: grow(it, "b"))


@scenario("kv-allocator: use-after-free", "no hand-out and no free of this page was recorded")
def a_sequence_goes_on_in_a_page_that_nobody_got(arm):
    it = pools(arm)
    it.write("b", 6, a_free_page(it, "full"))
    return stopped(lambda: grow(it, "b"))


@scenario("kv-allocator: mapping-mismatch", "the mapping was wrong as soon as")
def written_wrong_by_the_allocator(arm):
    it = pools(arm)
    nobodys = tokens_of(a_free_page(it, "swa") - 1)
    return stopped(lambda: with_swa_pages(it, lambda out: nobodys, PAGE))


def with_swa_pages(it: Any, change: Callable[[Any], Any], tokens: int) -> None:
    """Admit a request while something stands between the SWA pool's allocator and the mapping."""
    inner = it.rig.allocator.swa_attn_allocator
    real = type(inner).alloc_extend
    inner.alloc_extend = lambda *args, **kwargs: change(real(inner, *args, **kwargs))
    it.admit("d", tokens, 0)


@scenario("kv-allocator: mapping-mismatch", "what wraps it did. SWA page")
def doubled_by_the_outer_allocator(arm):
    """The issue's: two full pages get the same SWA page, and nothing was overwritten."""
    it = pools(arm)
    theirs = tokens_of(it.rig.page("a", 1, "swa"))
    kind, cause = stopped(lambda: with_swa_pages(it, lambda out: theirs, PAGE))
    assert "overwritten" not in cause
    assert f"is already that of full page {it.rig.page('a', 1)} (request a)" in cause
    assert "the mapping was wrong as soon as" in cause
    return kind, cause.replace("the mapping was wrong as soon as", "")


@scenario("kv-allocator: mapping-mismatch", "the mapping was right when the page was handed out")
def overwritten_before_the_sequence_goes_on(arm):
    it = pools(arm)
    map_to(it, it.rig.page("b", 5, "swa"))
    return stopped(lambda: grow(it, "b"))


@scenario("kv-allocator: mapping-mismatch", "the mapping was right when the pages were handed out")
def overwritten_before_a_free(arm):
    it = pools(arm)
    map_to(it, it.rig.page("b", 5, "swa"))
    return stopped(lambda: it.rig.allocator.free_swa(it_row(it, it.requests["b"], 100)[6 * PAGE :]))


@scenario("kv-allocator: maps-freed", "without free_swa, which clears the mapping")
def freed_behind_the_mapping(arm):
    it = pools(arm)
    swa = tokens_of(it.rig.page("b", 6, "swa"))
    return stopped(lambda: it.rig.allocator.swa_attn_allocator.free(swa))


@scenario("kv-allocator: maps-freed", "set_full_to_swa_mapping was given SWA page")
def mapped_to_a_free_page(arm):
    it = pools(arm)
    full, swa = tokens_of(it.rig.page("b", 6)), tokens_of(a_free_page(it, "swa"))
    return stopped(lambda: it.rig.allocator.set_full_to_swa_mapping(full, swa))


def books() -> tuple[Ledger, PoolLedger]:
    """A ledger with a full pool of 40 pages, in which nothing has happened."""
    ledger = Ledger(Recorder(4))
    ledger.pools["full"] = pool = PoolLedger("full", 40, PAGE)
    return ledger, pool


def event(kind: str, *pages: int, caller: str = "plugin.py:1 f", request: str = "") -> PageEvent:
    return PageEvent(1, kind, "full", pages, len(pages), request, caller)


def judged(
    ledger: Ledger, pool: PoolLedger, kind: Any, at: PageEvent, *pages: int
) -> tuple[str, str]:
    violation = swa_check.Violation(kind, np.array(pages))
    return kind, swa_causes.cause(ledger, pool, at, violation)


@scenario("kv-allocator: evicted-in-window", "the request's own eviction went too far")
def too_far(arm):
    at = event("evict", 5, caller="schedule_batch.py:2744 _evict_swa")
    return judged(*books(), "evicted-in-window", at, 5)


@scenario("kv-allocator: evicted-in-window", "the prefix cache gave it up")
def unlocked(arm):
    at = event("evict", 5, caller="swa_radix_cache.py:580 evict")
    return judged(*books(), "evicted-in-window", at, 5)


@scenario("kv-allocator: foreign-free", "of its row")
def a_row_that_names_anothers_page(arm):
    it = pools(arm)
    running(it)
    it.write("b", 5, it.rig.page("a", 1))
    return stopped(lambda: release(it, "b"))


@scenario("kv-allocator: foreign-free", "freed other indices than those of the row")
def a_release_of_other_indices(arm):
    it = pools(arm)
    running(it)
    return stopped(lambda: release(it, "b", it_row(it, it.requests["a"], 50)))


@scenario("kv-allocator: freed-while-read", "gave a node of the prefix cache new pages")
def a_tombstone_recovered(arm):
    at = event("free", 5, caller="swa_radix_cache.py:1139 _insert_helper")
    return judged(*books(), "freed-while-read", at, 5)


@scenario("kv-allocator: freed-while-read", "which of the two is not known")
def freed_by_somebody(arm):
    at = event("free", 5, caller="swa_radix_cache.py:580 evict")
    return judged(*books(), "freed-while-read", at, 5)


# --- pool-leak, on a ledger ---------------------------------------------------------------------


def happened(*kinds_of_events: str, request: str = "a") -> Ledger:
    """A ledger in which page 5 was handed out to a, and then this happened to it."""
    ledger, pool = books()
    page = np.array([5])
    ledger.enter(pool, "extend", page, holds=True, request=request, caller="common.py:441 alloc")
    for kind in kinds_of_events:
        ledger.enter(pool, kind, page, holds=False, caller="plugin.py:7 tidy_up")
    return ledger


def counted(
    ledger: Ledger, free: list[int], owned: list[int], live: tuple[str, ...] = (), **released: Any
) -> tuple[str, str]:
    """The finding of a census of a pool that has the pages 1..5."""
    census = take_census(6, np.array(free), np.array(owned, dtype=np.int64))
    requests = [Request(rid=rid) for rid in live]
    finding, _, _ = leak_report.describe("full", census, requests, released, ledger, True)
    return finding.kind, finding.cause


@scenario("pool-leak: leaked", "release_kv_cache in step 7")
def lost_in_its_release(arm):
    return counted(happened(), [1, 2, 3, 4], [], a=(7, False))


@scenario("pool-leak: leaked", "no call of it was seen")
def lost_without_a_release(arm):
    return counted(happened(), [1, 2, 3, 4], [])


@scenario("pool-leak: leaked", "which is still live")
def lost_from_a_live_row(arm):
    return counted(happened(), [1, 2, 3, 4], [], live=("a",))


@scenario("pool-leak: leaked", UNKNOWN)
def lost_by_nobody(arm):
    return counted(happened(request=""), [1, 2, 3, 4], [])


@scenario("pool-leak: double", "while somebody still uses it")
def freed_and_used(arm):
    return counted(happened("free"), [1, 2, 3, 4, 5], [5])


@scenario("pool-leak: double", "no free of the page was recorded since it was handed out")
def never_freed_and_used(arm):
    return counted(happened(), [1, 2, 3, 4, 5], [5])


@scenario("pool-leak: repeated", "the page was freed twice")
def twice_in_the_list(arm):
    return counted(happened("free", "free"), [1, 2, 3, 4, 5, 5], [])


@scenario("pool-leak: repeated", "no second free of the page was recorded")
def twice_without_a_second_free(arm):
    return counted(happened("free"), [1, 2, 3, 4, 5, 5], [])


@scenario("pool-leak: outside", "no page of this pool was freed in step")
def a_far_page_was_freed(arm):
    ledger = happened("free")
    ledger.enter(ledger.pools["full"], "free", np.array([99]), holds=False, caller="plugin.py:7 f")
    return counted(ledger, [1, 2, 3, 4, 5, 99], [])


@scenario("pool-leak: outside", "no free of this index was recorded")
def a_far_page_from_nowhere(arm):
    return counted(happened("free"), [1, 2, 3, 4, 5, 99], [])


def a_row(**released: Any) -> tuple[str, str]:
    request = Request(rid="a", req_pool_idx=3, kv_allocated_len=50)
    finding, _ = leak_report.describe_rows([request], released, happened())
    return finding.kind, finding.cause


@scenario("pool-leak: row", "did not reach ReqToTokenPool.free")
def released_but_not_given_back(arm):
    return a_row(a=(7, True))


@scenario("pool-leak: row", "it was dropped without being released")
def never_released(arm):
    return a_row()


# --- spec-lifecycle, on what its checks return --------------------------------------------------


def handed_over(violation: Violation | None, site: str = "batch.merge") -> tuple[str, str]:
    assert violation is not None
    batch = SimpleNamespace(forward_mode=None)
    at = hand_over.HandOver(site, "here", batch, ("a", "b"))
    finding = spec_report.describe(violation, at, Recorder(4))
    return finding.kind, finding.cause


def still_verify() -> Violation | None:
    return spec_check.check_state("verify-input", "FrozenKVMTPVerifyInput", ("draft-input",))


@scenario("spec-lifecycle: verify-input-left", UNKNOWN + ": no forward")
def nobody_left_it(arm):
    return handed_over(still_verify())


def nothing() -> Violation | None:
    return spec_check.check_state("idle", "NoneType", ("draft-input",))


@scenario("spec-lifecycle: spec-info-dropped", "lost between two steps")
def dropped_outside_the_worker(arm):
    return handed_over(nothing())


@scenario("spec-lifecycle: spec-info-dropped", "lost inside the worker's step")
def dropped_inside_the_worker(arm):
    return handed_over(nothing(), "worker.verify")


@scenario("spec-lifecycle: wrong-type", "of the right type, but is not the one")
def another_object(arm):
    return handed_over(Violation("wrong-type", "the verify-input of this step", "another object"))


@scenario("spec-lifecycle: wrong-type", "a stage was left out, or ran twice")
def another_stage(arm):
    return handed_over(spec_check.check_state("draft-extend-input", "X", ("draft-input",)))


@scenario("spec-lifecycle: wrong-shape", "2 rows too many")
def rows_left_over(arm):
    return handed_over(spec_check.check_rows({"topk_p": 4}, {"topk_p": 2}))


@scenario("spec-lifecycle: wrong-shape", "lacks 1 rows")
def rows_lost(arm):
    return handed_over(spec_check.check_rows({"topk_p": 1}, {"topk_p": 2}))


@scenario("spec-lifecycle: wrong-shape", "was never set, or was dropped")
def no_rows(arm):
    return handed_over(spec_check.check_rows({"topk_p": -1}, {"topk_p": 2}))


@scenario("spec-lifecycle: accept-length", "counted too few tokens")
def nothing_accepted(arm):
    return handed_over(spec_check.check_accepted([0, -1], 2, 3))


@scenario("spec-lifecycle: accept-length", "counted too many tokens")
def too_much_accepted(arm):
    return handed_over(spec_check.check_accepted([9, 0], 2, 3))


@scenario("spec-lifecycle: accept-length", "another number of requests")
def accepted_for_others(arm):
    return handed_over(spec_check.check_accepted([0], 2, 3))


def lengths(got: list[int]) -> tuple[str, str]:
    return handed_over(spec_check.check_counts("seq-len", "seq_lens", [10, 20], got))


@scenario("spec-lifecycle: seq-len", "counts 1 tokens whose KV is not committed")
def too_long(arm):
    return lengths([11, 20])


@scenario("spec-lifecycle: seq-len", "leaves out 2 tokens whose KV is committed")
def too_short(arm):
    return lengths([10, 18])


@scenario("spec-lifecycle: seq-len", "of another number of requests")
def of_others(arm):
    return lengths([10])


def stale(got: str) -> tuple[str, str]:
    expected = "those that were selected for the seed step"
    return handed_over(Violation("stale-hidden-state", expected, got, what="hidden_states"))


@scenario("spec-lifecycle: stale-hidden-state", "overwritten in place")
def overwritten_hidden_states(arm):
    return stale("a tensor that was written to since then")


@scenario("spec-lifecycle: stale-hidden-state", "another tensor is in the place")
def other_hidden_states(arm):
    return stale("another tensor")


@scenario("spec-lifecycle: stale-hidden-state", "dropped on the way")
def no_hidden_states(arm):
    return stale("None")


@scenario("spec-lifecycle: stale-hidden-state", "the tensor of the step before")
def the_last_steps_hidden_states(arm):
    return stale("those of the step before")


def in_v2(violation: Violation | None, site: str = "scheduler.run_batch") -> tuple[str, str]:
    return handed_over(violation, site)


@scenario("spec-lifecycle: verify-input-left", "the verify input of its own step")
def left_when_the_step_ended(arm):
    return in_v2(still_verify())


@scenario("spec-lifecycle: spec-info-dropped", "lost when the step ended")
def dropped_when_the_step_ended(arm):
    return in_v2(nothing())


@scenario("spec-lifecycle: bookkeeping", "by the processing of the verify's result")
def counted_twice_in_the_result(arm):
    violation = spec_check.check_counts("bookkeeping", "spec_verify_ct", [1, 2], [1, 3])
    return in_v2(violation, "result.resolve")


@scenario("spec-lifecycle: bookkeeping", "by putting the tokens out")
def put_out_twice(arm):
    violation = spec_check.check_counts("bookkeeping", "output_ids", [1, 2], [1, 3])
    return in_v2(violation, "scheduler.stream_output")


@scenario("spec-lifecycle: future-row", "two requests that both live")
def one_row_for_two(arm):
    return in_v2(spec_check.check_owners([3, 3], ["a", "b"], [None, None]))


@scenario("spec-lifecycle: future-row", "were filtered, merged or put in order at different times")
def rows_exchanged(arm):
    return in_v2(spec_check.check_same_rows([3, 1], [1, 3]))


def read_from(written: Any) -> tuple[str, str]:
    return in_v2(spec_check.check_written("lengths", 3, "a", written))


@scenario("spec-lifecycle: future-row", "nothing wrote the lengths of this request")
def nobody_wrote_the_row(arm):
    return read_from(None)


@scenario("spec-lifecycle: future-row", "written for another request in between")
def somebody_else_wrote_the_row(arm):
    return read_from(("b", 5))


@scenario("spec-lifecycle: future-row", "the step ended without a stash")
def not_stashed(arm):
    return in_v2(Violation("future-row", "x", "not stashed", what="not stashed"))


def publish(**changes: bool | int) -> tuple[str, str]:
    sound = {"decode": True, "verified": True, "times": 0, "own_lengths": True, "own_rows": True}
    return in_v2(spec_check.check_publish(**{**sound, **changes}))


@scenario("spec-lifecycle: future-row", "the rows by which the worker's step was published")
def published_in_other_rows(arm):
    return publish(own_rows=False)


@scenario("spec-lifecycle: publish-order", "before its verify had counted")
def published_before_the_verify(arm):
    return publish(verified=False)


@scenario("spec-lifecycle: publish-order", "published, or the worker did so twice")
def published_twice(arm):
    return publish(times=1)


@scenario("spec-lifecycle: publish-order", "is not the one that the verify made")
def published_other_lengths(arm):
    return publish(own_lengths=False)


@scenario("spec-lifecycle: publish-order", "did not call it")
def not_published(arm):
    return in_v2(spec_check.check_published(True))


def bonus(got: int) -> tuple[str, str]:
    violation = spec_check.check_bonus(["a", "b"], [7, 8], [7, got], lambda i: [i + 1])
    return in_v2(violation, "result.resolve")


@scenario("spec-lifecycle: bonus-token", "the token is the last token of request a")
def the_other_requests_token(arm):
    return bonus(7)


@scenario("spec-lifecycle: bonus-token", "the request had this token before")
def an_earlier_token(arm):
    return bonus(2)


@scenario("spec-lifecycle: bonus-token", UNKNOWN + ": no request of the batch")
def a_token_of_nobody(arm):
    return bonus(5)


@scenario("spec-lifecycle: allocated-len", "the allocation for this step was left out")
def not_allocated_ahead(arm):
    return in_v2(spec_check.check_allocated([8], [5], "why"), "batch.prepare_for_decode")


@scenario("spec-lifecycle: allocated-len", "went further than was allocated ahead")
def went_too_far(arm):
    return in_v2(spec_check.check_allocated([8], [5], "why"), "result.resolve")


def bound_to(first: int) -> tuple[str, str]:
    wrong = spec_check.check_embedding(256, first, 512, 512, 1, 2)
    return in_v2(wrong, "draft.bind_embedding")


@scenario("spec-lifecycle: draft-embedding", "the rows of one tensor-parallel rank")
def bound_to_a_shard(arm):
    return bound_to(first=256)


@scenario("spec-lifecycle: draft-embedding", "not known: the table is no part of the target's")
def bound_to_another_table(arm):
    return bound_to(first=-1)


def computed_on(which: str) -> tuple[str, str]:
    wrong = spec_check.check_pool(False, "TritonAttnBackend", which, 4096, 64)
    return in_v2(wrong, "attn.hybrid_metadata")


@scenario("spec-lifecycle: draft-pool", "did not hand it on to the backend inside it")
def the_view_ends_at_the_wrapper(arm):
    return computed_on("its own")


@scenario("spec-lifecycle: draft-pool", "not known: that pool is neither")
def a_pool_of_neither(arm):
    return computed_on("another")


@scenario("spec-lifecycle: draft-places", "has to set them to None before its forward")
def the_prefills_places(arm):
    return in_v2(spec_check.check_places(146, 1, cleared=False), "worker.draft_forward")


@scenario("spec-lifecycle: draft-places", UNKNOWN + ": in this release")
def places_after_they_were_cleared(arm):
    return in_v2(spec_check.check_places(146, 1, cleared=True), "worker.draft_forward")


# --- kv-writes, on SGLang's real pools and backend ----------------------------------------------


def writes(arm: Any, spoil: Callable[[Any, Any], None], sliding: bool = False) -> tuple[str, str]:
    """(kind, cause) of a decode in which ``spoil(it, batch)`` has changed something."""
    arm(**ARMED)
    it = Writing()
    layers = it.sliding_layers() if sliding else it.full_layers()
    finding, _ = it.found("decode", lambda batch: spoil(it, batch), layers)
    return finding.kind, finding.cause


def at_full(value: Callable[[Any], int]) -> Callable[[Any, Any], None]:
    """Request a's newest token goes to another slot of the full pool."""
    return lambda it, batch: put(0, value(it))(batch)


def at_swa(value: Callable[[Any], int]) -> Callable[[Any, Any], None]:
    """The same in the SWA pool."""

    def spoil(it: Any, batch: Any) -> None:
        swa_loc(it)[0] = value(it)

    return spoil


def mapped(it: Any, rid: str, position: int) -> int:
    return int(it.rig.allocator.full_to_swa_index_mapping[it.right(rid, position)])


def free_slot(it: Any, pool: str) -> int:
    allocator = getattr(it.rig.allocator, f"{pool}_attn_allocator")
    return next(p for p in allocator.free_pages.tolist() if p) * PAGE


for _kind, _full, _swa in (
    ("negative", lambda it: -3, lambda it: -3),
    ("out-of-range", lambda it: FAR, lambda it: FAR),
    ("page-zero", lambda it: 2, lambda it: 2),
    ("other-request", lambda it: it.right("c", 30), lambda it: mapped(it, "c", 59)),
    ("stale", lambda it: free_slot(it, "full"), lambda it: free_slot(it, "swa")),
):
    scenario(f"kv-writes: {_kind}", "ForwardBatch.out_cache_loc is not what")(
        lambda arm, value=_full: writes(arm, at_full(value))
    )
    scenario(f"kv-writes: {_kind}", "the sliding layers' locations are not what")(
        lambda arm, value=_swa: writes(arm, at_swa(value), sliding=True)
    )


@scenario("kv-writes: mismatch", "ForwardBatch.out_cache_loc is not what")
def own_other_page(arm: Any) -> tuple[str, str]:
    return writes(arm, at_full(lambda it: it.right("a", 3)))


@scenario("kv-writes: mismatch", "which was not handed out to this request")
def the_row_is_wrong(arm: Any) -> tuple[str, str]:
    def spoil(it: Any, batch: Any) -> None:
        it.row("a")[49] = it.right("c", 30)

    return writes(arm, spoil)


@scenario("kv-writes: mismatch", "full_to_swa_index_mapping is wrong")
def the_mapping_is_wrong(arm: Any) -> tuple[str, str]:
    """Behind the ledger's back; then it is asked which of the two is right."""
    arm(**ARMED)
    it, right = Writing(), 0
    launch, place = written(it), it.right("a", 49)
    launch.pool_name, right = "swa", mapped(it, "a", 49)
    it.rig.allocator.full_to_swa_index_mapping[place] = mapped(it, "a", 33)
    wrong = mapped(it, "a", 49)
    write = Write(0, 49, wrong, 50, 1, WriteKind.MISMATCH, right, -1, it.row_of("a"), place)
    finding, _ = writes_report.describe(launch, write, plugin.in_force.recorder, it.ledger)
    return finding.kind, finding.cause


@scenario("kv-writes: written-twice", "ForwardBatch.out_cache_loc is not what")
def one_of_them_is_wrong(arm: Any) -> tuple[str, str]:
    return writes(arm, at_full(lambda it: it.right("b", 99)))


@scenario("kv-writes: written-twice", "two cells of req_to_token name one place")
def both_rows_name_it(arm: Any) -> tuple[str, str]:
    def spoil(it: Any, batch: Any) -> None:
        it.row("a")[49] = it.right("b", 99)
        put(0, it.right("b", 99))(batch)

    return writes(arm, spoil)


@scenario("kv-writes: use-after-free", "freed too early")
def freed_while_it_is_written(arm: Any) -> tuple[str, str]:
    def spoil(it: Any, batch: Any) -> None:
        it.rig.allocator.free(batch.out_cache_loc[:1])

    return writes(arm, spoil)


@scenario("kv-writes: use-after-free", "never handed out")
def a_page_that_nobody_ever_had(arm: Any) -> tuple[str, str]:
    def spoil(it: Any, batch: Any) -> None:
        it.row("a")[49] = free_slot(it, "full")
        put(0, free_slot(it, "full"))(batch)

    return writes(arm, spoil)


def written(it: Any) -> Any:
    """What the tracer knows of a forward that it has checked."""
    it.forward("decode", None, it.full_layers())
    tracer = next(
        e.around.__self__
        for e in plugin.in_force.hooks._entries["attn.forward"]
        if e.owner == "kv-writes"
    )
    return next(iter(tracer.checks.values()))


def described(arm: Any, kind: Any, value: int) -> tuple[str, str]:
    """What is said of a location of the first row; for kinds that only a GPU can have."""
    arm(**ARMED)
    it = Writing()
    write = Write(0, 49, value, 50, 1, kind, -1, -1, it.row_of("a"), value)
    launch = written(it) if kind is not WriteKind.UNREADABLE else None
    finding, _ = writes_report.describe(launch, write, plugin.in_force.recorder, it.ledger)
    return finding.kind, finding.cause


for _kind, _of in (("padding-row", WriteKind.PADDING), ("unreadable", WriteKind.UNREADABLE)):
    for _value in (20, 600):
        scenario(f"kv-writes: {_kind}", UNKNOWN)(
            lambda arm, of=_of, value=_value: described(arm, of, value)
        )


def foreign_row(arm: Any, victim: str, owner: str) -> tuple[str, str]:
    """The row of one request names a page of another one, and the location was made from it."""

    def spoil(it: Any, batch: Any) -> None:
        scheduled(it)
        column = (TOKENS[victim] - 1) // PAGE
        page = it.rig.page(owner, 1)
        cells = it.row(victim)[column * PAGE : (column + 1) * PAGE]
        cells.copy_(torch.arange(page * PAGE, (page + 1) * PAGE))
        row = list(TOKENS).index(victim)
        put(row, int(it.row(victim)[TOKENS[victim] - 1]))(batch)

    return writes(arm, spoil)


scenario("kv-writes: foreign-page", UNKNOWN)(lambda arm: foreign_row(arm, "a", "c"))
scenario("kv-writes: foreign-page", UNKNOWN)(lambda arm: foreign_row(arm, "b", "a"))


def cached_place(arm: Any, cached: int) -> tuple[str, str]:
    """The prefix cache holds the beginning of a's row, and the prefill begins before its end."""
    arm(**ARMED)
    it = Writing(cached=cached)
    scheduled(it, cached=it.row("a")[:cached].tolist())
    finding, _ = it.found("extend", None, it.full_layers())
    return finding.kind, finding.cause


scenario("kv-writes: cached-page", UNKNOWN)(lambda arm: cached_place(arm, 48))
scenario("kv-writes: cached-page", UNKNOWN)(lambda arm: cached_place(arm, 44))


# --- kv-integrity -------------------------------------------------------------------------------

ALSO = "it is also in the row of b (column 3)"


@scenario("kv-integrity: write-after-free", "the page was freed too early")
def somebody_still_has_the_page(arm):
    return "write-after-free", kv_causes.cause_of_write(event("free", 5), ALSO)


@scenario("kv-integrity: write-after-free", "no live request has the page in its row")
def nobody_has_the_page(arm):
    return "write-after-free", kv_causes.cause_of_write(event("free", 5), "")


@scenario("kv-integrity: kv-changed", "only one buffer of one layer changed")
def one_buffer(arm):
    return "kv-changed", kv_causes.cause_of_change(1, "")


@scenario("kv-integrity: kv-changed", "another request wrote into the page")
def another_request_has_it(arm):
    return "kv-changed", kv_causes.cause_of_change(8, ALSO)


@scenario("kv-integrity: kv-changed", "who it was is not known")
def a_wrong_index(arm):
    return "kv-changed", kv_causes.cause_of_change(8, "")


@scenario("kv-integrity: nan", "only one row of one buffer")
def one_row(arm):
    return "nan", kv_causes.cause_of_nan(3, "full", False, 1)


@scenario("kv-integrity: nan", "the first layer of the full pool has it already")
def from_the_beginning(arm):
    return "nan", kv_causes.cause_of_nan(2, "full", True, 30)


@scenario("kv-integrity: nan", "the layers of this pool before it are finite")
def from_a_layer_on(arm):
    return "nan", kv_causes.cause_of_nan(3, "full", False, 30)


# --- flight-recorder: its only evidence of a cause is what other tracers reported before --------


def ended(kind: str, *reported: str) -> tuple[str, str]:
    settings = SimpleNamespace(mode="log", hang_seconds=60)
    trap = SimpleNamespace(reported=list(reported), doubted={})
    context = SimpleNamespace(settings=settings, trap=trap, recorder=Recorder(4))
    if kind == "hang":
        hang = SimpleNamespace(what="a step", seconds=90.0)
        finding = flight_report.of_hang(hang, "SIGTERM", context, True)
    else:
        text = "CUDA error: an illegal memory access" if kind == "cuda-error" else "boom"
        error = RuntimeError(text)
        finding = flight_report.of_exception(
            error, "scheduler.run_batch", context, True, lambda cuda: []
        )
    return finding.kind, finding.cause


for _kind in ("cuda-error", "exception", "hang"):
    scenario(f"flight-recorder: {_kind}", "this finding did not stop the server")(
        lambda arm, kind=_kind: ended(kind, "g4debug: page-table: page 99")
    )
    scenario(f"flight-recorder: {_kind}", "not known: no tracer reported anything before")(
        lambda arm, kind=_kind: ended(kind)
    )


def other_rank(dump: str) -> tuple[str, str]:
    """Another rank stopped, and left a dump or none."""
    stop = Stop("page-table", "stale", "g4debug: page-table: page 9", dump)
    first = Seat(1, 4711, STOPPED, 0, 1, 0, -1, 1, stop)
    context = SimpleNamespace(recorder=Recorder(4))
    finding = flight_report.of_other_rank(first, None, context)
    return finding.kind, finding.cause


@scenario("flight-recorder: other-rank", "its dump: /dumps/a.pt")
def another_rank_with_a_dump(arm):
    return other_rank("/dumps/a.pt")


@scenario("flight-recorder: other-rank", "it has left no dump")
def another_rank_without_a_dump(arm):
    return other_rank("")


def differing(*differences: Difference) -> tuple[str, str]:
    seat = Seat(1, 4711, ALIVE, 0, 1, 0, -1, 0, Stop())
    finding = rank_report.describe(9, "dp0/tp0/pp0", seat, differences, "DECODE", 0)
    return finding.kind, finding.cause


@scenario("rank-divergence: ranks-differ", "c is in the batch of dp0/tp1/pp0 only")
def a_request_on_one_rank_only(arm):
    lengths = Difference("sequence lengths", "5, 6", "5, 6, 7")
    return differing(Difference("requests", "a, b", "a, b, c"), lengths)


@scenario("rank-divergence: ranks-differ", "the same requests in another order")
def requests_in_another_order(arm):
    return differing(Difference("requests", "a, b", "b, a"))


@scenario("rank-divergence: ranks-differ", "was aborted on one rank and not on the other")
def an_abort_on_one_rank(arm):
    return differing(Difference("ending requests", "none", "b"))


@scenario("rank-divergence: ranks-differ", "the ranks sampled different tokens")
def other_tokens_on_one_rank(arm):
    return differing(Difference("output tokens", "5 (checksum 1)", "5 (checksum 2)"))


@scenario("rank-divergence: ranks-differ", "the prefix caches of the ranks hold different")
def another_prefix(arm):
    lengths = Difference("extend lengths", "64", "128")
    return differing(Difference("prefix lengths", "128", "64"), lengths)


@scenario("rank-divergence: ranks-differ", "its KV is kept in other places")
def other_places(arm):
    return differing(Difference("out_cache_loc", "64", "128"))


@scenario("rank-divergence: ranks-differ", "something on one of the ranks decides by itself")
def another_length(arm):
    return differing(Difference("sequence lengths", "5", "6"))


def asserted(rows: int) -> tuple[str, str]:
    """A device assert. The host knows the ids that go into a table of so many rows."""
    context = SimpleNamespace(
        settings=SimpleNamespace(mode="log"),
        trap=SimpleNamespace(reported=[], doubted={}),
        recorder=Recorder(4),
    )
    table = Lookup("the draft's table", "a.py", "ids", ("embedding",), rows, 0, 511)
    said = Asserted((), lookups.judge((table,), ()))
    error = RuntimeError("CUDA error: device-side assert triggered")
    finding = flight_report.of_exception(
        error, "scheduler.run_batch", context, True, lambda cuda: [], said
    )
    return finding.kind, finding.cause


@scenario("flight-recorder: device-assert", "only the draft's table (a.py) has indices that do not")
def a_table_that_is_too_small(arm):
    return asserted(256)


@scenario("flight-recorder: device-assert", "no index is known that does not fit its table")
def a_table_that_is_large_enough(arm):
    return asserted(512)


# --- and all of them ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_has_two_scenarios(kind):
    told = [tells for tells, _ in SCENARIOS.get(kind, [])]
    assert len(told) >= 2, f"{kind} has {len(told)} scenarios in this file, and needs two"
    assert len(set(told)) == len(told) or set(told) == {UNKNOWN}


def test_no_scenario_is_of_a_kind_that_is_gone():
    assert set(SCENARIOS) <= set(kinds())


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(kind, number, id=f"{kind}-{function.__name__}")
        for kind, scenarios in SCENARIOS.items()
        for number, (_, function) in enumerate(scenarios)
    ],
)
def test_a_cause_is_told_from_the_others(kind, number, arm):
    tells, function = SCENARIOS[kind][number]
    found, cause = function(arm)
    assert found == kind.partition(": ")[2]
    assert tells in cause
    for other, _ in SCENARIOS[kind]:
        assert other in (tells, UNKNOWN) or other not in cause, cause
