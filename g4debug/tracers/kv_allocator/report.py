"""Turns a violation of the allocators into a Finding. Runs only then."""

from __future__ import annotations

from g4debug.findings.kinds import ALLOCATOR, ARMED, KINDS, FindingKind
from g4debug.findings.record import Finding, Location, PageEvent
from g4debug.fixes import locked_prefix
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import about, short
from g4debug.tracers.kv_allocator.causes import cause, frees_locked
from g4debug.tracers.kv_allocator.check import Violation

NAMED = 8  # pages that are named one by one


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

    rid: the request to blame, '' for the event's own request. row: see ``causes.cause``.
    """
    page, count = int(violation.pages[0]), len(violation.pages)
    events = (*ledger.history(pool.name, page), about(event, page))
    record = KINDS["kv-allocator"][violation.kind]
    request = rid or event.request
    verb = "freed" if event.kind in ("free", "evict", "unmap") else "handed out"
    facts = {"last": pool.pages - 1, "pool": pool.name, "verb": verb, "request": request}
    if violation.kind == "foreign-free":
        facts["owner"] = str(pool.owner[page])
    mode = getattr(getattr(ledger.batch, "forward_mode", None), "name", "")
    where = f" in {mode.lower().replace('_', '-')}" if mode else ""
    by = f" (called by {event.caller})" if event.caller else ""
    fix, command = _explain(event, record)
    finding = record.finding(
        site=_site(event, pool),
        headline=(
            f"g4debug: kv-allocator{where}: {pool.name.upper()} page {page} "
            f"{record.what.format(**facts)}{by}"
        ),
        location=Location(
            process="scheduler",
            step=event.step,
            forward_mode=mode,
            layer_kind="sliding" if pool.name == "swa" else "full",
            request=request,
        ),
        expected=record.expected.format(**facts),
        got=_got(violation, note or event.note, count),
        owner=_owner(pool, page, request),
        history=short(events),
        cause=cause(ledger, pool, event, violation, row),
        reference=fix + record.reference_for(by),
        next_command=command,
    )
    return finding, events


def _explain(event: PageEvent, record: FindingKind) -> tuple[str, str]:
    """(the fix that matches, as a prefix of the reference, next command)."""
    mends = record.fix and frees_locked(event) and locked_prefix.FIX.is_for_this_release
    if mends:
        fix = f"fix {record.fix} (sglang #29352 fixed it in 0.5.15); "
        return fix, f"G4DEBUG_FIX_LOCKED_PREFIX=1 {ARMED}"
    # Contain mode corrects a bad free, before it happens.
    return "", record.command if event.kind == "free" else ALLOCATOR


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
