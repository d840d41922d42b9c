"""Turns a violation of the allocators into a Finding. Runs only then."""

from __future__ import annotations

import os
from dataclasses import dataclass

from g4debug.findings.record import Finding, LayerKind, Location, PageEvent
from g4debug.fixes import locked_prefix
from g4debug.hooking import targets
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import about, short
from g4debug.tracers.kv_allocator.causes import cause, frees_locked
from g4debug.tracers.kv_allocator.check import Kind, Violation

NAMED = 8  # pages that are named one by one


@dataclass(frozen=True)
class Words:
    """How the report says one kind of violation."""

    what: str  # comes after "FULL page 7" in the headline
    expected: str


WORDS: dict[Kind, Words] = {
    "out-of-range": Words(
        "was {verb}, but does not exist",
        "pages 1..{last} of the {pool} pool",
    ),
    "page-zero": Words(
        "is reserved, and was {verb}",
        "pages 1..{last}; page 0 takes the writes of padded tokens and has no owner",
    ),
    "double-alloc": Words("was handed out while it is held", "a free page"),
    "double-free": Words("was freed twice", "a page that is held"),
    "free-unallocated": Words("was freed, but never handed out", "a page that is held"),
    "use-after-free": Words(
        "is not held, but a sequence continues in it",
        "the page with the sequence's last token is held",
    ),
    "mapping-mismatch": Words(
        "does not match full_to_swa_index_mapping",
        "the SWA page that was handed out together with the full page",
    ),
    "maps-freed": Words(
        "is free, but full_to_swa_index_mapping points to it",
        "a mapping that points only to SWA pages that are held",
    ),
    "evicted-in-window": Words(
        "was evicted inside the window of request {request}",
        "only pages that lie completely before the window are evicted",
    ),
    "foreign-free": Words(
        "of request {owner}, which still runs, is freed by the release of request {request}",
        "pages that were handed out to the request that is released, or to nobody who runs",
    ),
    "freed-while-read": Words(
        "of the prefix cache is freed while request {request} reads it",
        "pages of the prefix cache are freed when no running request reads them",
    ),
}
_ALL = "G4DEBUG_TRACE=kv-allocator,page-table,pool-leak <your launch command>"
_BOOKS = "TRIAGE.md, 'A KV page is freed twice, handed out twice, or used after it was freed'"
_EVICTED = "TRIAGE.md, 'A SWA page is evicted inside the window'"
REFERENCES: dict[Kind, str] = {
    "out-of-range": _BOOKS,
    "page-zero": _BOOKS,
    "double-alloc": _BOOKS,
    "double-free": _BOOKS,
    "free-unallocated": _BOOKS,
    "use-after-free": _BOOKS,
    "mapping-mismatch": _BOOKS,
    "maps-freed": _BOOKS,
    "evicted-in-window": _EVICTED,
    "foreign-free": _BOOKS,
    "freed-while-read": _BOOKS,
}


def describe(
    ledger: Ledger,
    pool: PoolLedger,
    event: PageEvent,
    violation: Violation,
    note: str,
    rid: str,
    row: str = "",
) -> tuple[Finding, tuple[PageEvent, ...]]:
    """The finding, and the history of the first bad page up to this event.

    rid: the request to blame, '' for that of the event. row: see ``causes.cause``.
    """
    page, count = int(violation.pages[0]), len(violation.pages)
    events = (*ledger.history(pool.name, page), about(event, page))
    words = WORDS[violation.kind]
    request = rid or event.request
    verb = "freed" if event.kind in ("free", "evict", "unmap") else "handed out"
    facts = {"last": pool.pages - 1, "pool": pool.name, "verb": verb, "request": request}
    if violation.kind == "foreign-free":
        facts["owner"] = str(pool.owner[page])
    mode = getattr(getattr(ledger.batch, "forward_mode", None), "name", "")
    where = f" in {mode.lower().replace('_', '-')}" if mode else ""
    by = f" (called by {event.caller})" if event.caller else ""
    kind: LayerKind = "sliding" if pool.name == "swa" else "full"
    fix, command = _explain(event, violation)
    finding = Finding(
        check="kv-allocator",
        kind=violation.kind,
        site=_site(event, pool),
        headline=(
            f"g4debug: kv-allocator{where}: {pool.name.upper()} page {page} "
            f"{words.what.format(**facts)}{by}"
        ),
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=ledger.recorder.rank,
            step=event.step,
            forward_mode=mode,
            layer_kind=kind,
            request=request,
        ),
        expected=words.expected.format(**facts),
        got=_got(violation, note or event.note, count),
        owner=_owner(pool, page, request),
        history=short(events),
        cause=cause(ledger, pool, event, violation, row),
        reference=fix + REFERENCES[violation.kind],
        next_command=command,
    )
    return finding, events


def _explain(event: PageEvent, violation: Violation) -> tuple[str, str]:
    """(the fix that matches, as a prefix of the reference, next command)."""
    if violation.kind == "freed-while-read":
        if frees_locked(event) and targets.matches(locked_prefix.FIX.needs):
            return (
                "fix locked-prefix (sglang #29352 fixed it in 0.5.15); ",
                "G4DEBUG_FIX_LOCKED_PREFIX=1 SGLANG_TRTLLM_MHA_DEBUG=1 <your launch command>",
            )
        return "", _ALL  # not contain: it does not mend this
    if event.kind == "free":
        return "", "G4DEBUG_MODE=contain SGLANG_TRTLLM_MHA_DEBUG=1 <your launch command>"
    return "", _ALL


def _got(violation: Violation, note: str, count: int) -> str:
    pages = ", ".join(str(p) for p in violation.pages[:NAMED].tolist())
    more = ", …" if count > NAMED else ""
    return f"page{'s' * (count != 1)} {pages}{more}" + (f" ({note})" if note else "")


def _owner(pool: PoolLedger, page: int, request: str) -> str:
    if not 0 < page < pool.pages:
        return f"no pool hands out a page {page}"
    owner = str(pool.owner[page]) or "a request that is not known"
    if pool.held[page]:
        return f"page {page} is held by {owner}"
    if pool.ever[page]:
        return f"page {page} is free; it was held by {owner}"
    return f"page {page} is free, and nobody ever held it"


def _site(event: PageEvent, pool: PoolLedger) -> str:
    """The hook site of the call that did it."""
    if event.kind in ("evict", "unmap"):
        return "swa.free_swa"
    if event.kind == "map":
        return "swa.set_mapping"
    if event.kind in ("mismatch", "miswritten", "returned"):
        return "swa.alloc_extend"
    if event.kind == "use":
        return f"pool.{event.note or 'alloc'}"
    name = {"extend": "alloc_extend", "decode": "alloc_decode"}.get(event.kind, event.kind)
    return f"pool.{name}"
