"""The likely cause of an allocator's mistake, from the history of the page.

Where the history fits more than one cause, or lacks the events that a cause would leave, the text
names the part that is not known.
"""

from __future__ import annotations

from collections.abc import Callable

from g4debug.findings.record import PageEvent
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import GIVES, TAKES, decided_by, last_of, said
from g4debug.tracers.kv_allocator.check import Violation

SWA_ALLOCATOR = "SWATokenToKVPoolAllocator"


class Case:
    """The evidence of one violation: its first page, and the earlier events of that page."""

    def __init__(
        self, ledger: Ledger, pool: PoolLedger, event: PageEvent, violation: Violation, row: str
    ) -> None:
        self.ledger, self.pool, self.event, self.row = ledger, pool, event, row
        self.page = int(violation.pages[0])
        known = 0 < self.page < pool.pages
        self.held = known and bool(pool.held[self.page])  # before the event
        self.history = ledger.history(pool.name, self.page)
        # Whether the free list had the page before the call that handed it out; None: not known.
        self.was_listed = _was_listed(ledger, pool, event, self.page)
        self.given = last_of(self.history, GIVES)
        self.taken = last_of(self.history, TAKES)


def _was_listed(ledger: Ledger, pool: PoolLedger, event: PageEvent, page: int) -> bool | None:
    lists = ledger.lists.get(pool.name)
    if lists is None or event.kind not in GIVES or ledger.late:
        return None
    return any(bool((pages == page).any()) for pages in lists.before)


def cause(
    ledger: Ledger, pool: PoolLedger, event: PageEvent, violation: Violation, row: str = ""
) -> str:
    """The likely cause, in words. row: of ``foreign-free``, where the freeing request's own row
    of ``req_to_token`` names the page, '' if it does not."""
    return _CAUSES[violation.kind](Case(ledger, pool, event, violation, row))


def _no_page(case: Case) -> str:
    if case.event.kind == "returned":
        return _replaced(case)
    if case.event.kind in TAKES:
        return (
            f"the caller gave indices of {_named(case)} to the allocator. They are from no "
            "allocator: an unset, cleared or overwritten cell of req_to_token or of the mapping; "
            "which of them is not known"
        )
    earlier = case.ledger.log.last_naming(case.pool.name, case.page, TAKES)
    if earlier is not None:
        return f"{_named(case)} was freed into the free list before, {said(earlier)}: look there"
    listed = case.was_listed
    if listed is None:
        return (
            f"not known: either the allocator's free list had {_named(case)}, although no free of "
            "it was recorded, or the allocator returned it without taking it from there"
        )
    if not listed:
        return _not_from_the_list(case)
    return (
        f"the allocator's free list had {_named(case)}, and no free of it was recorded: the list "
        "itself was overwritten; by whom is not known"
    )


def _not_from_the_list(case: Case) -> str:
    return (
        f"the allocator returned {_named(case)}, which was not in its free list: "
        f"{_method(case.event)}, or what wraps it, returned something else than what it took from "
        "there"
    )


def _method(event: PageEvent) -> str:
    return "alloc" if event.kind == "alloc" else f"alloc_{event.kind}"


def _named(case: Case) -> str:
    return "the reserved page 0" if case.page == 0 else f"page {case.page}"


def _replaced(case: Case) -> str:
    return (
        f"the allocators of the two pools handed out other pages ({case.event.note}): "
        f"{SWA_ALLOCATOR}, or what wraps it, returned this one instead"
    )


def _double_alloc(case: Case) -> str:
    if case.event.kind == "returned":
        return _replaced(case)
    if not case.held:
        return (
            "the page is twice in this one hand-out: the free list had it twice, or the allocator "
            "took it twice; which of the two is not known"
        )
    frees = [e for e in case.history if e.kind in TAKES]
    gives = [e for e in case.history if e.kind in GIVES]
    if len(frees) >= 2 and len(frees) > len(gives) - 1:
        return (
            f"the page was freed twice, {said(frees[-2])} and {said(frees[-1])}, so it was in the "
            "free list twice: look at the second free"
        )
    if case.was_listed is False:
        return _not_from_the_list(case)
    if case.was_listed:
        return (
            "the page was in the free list, although it is held and no free of it was recorded: it "
            "was put back into the list without free(), or the list was overwritten; which of the "
            "two is not known"
        )
    since = f" since it was handed out {said(case.given)}" if case.given is not None else ""
    return (
        f"no free of the page was recorded{since}: either the allocator handed it out without "
        "taking it from its free list, or it was put back into the list without free(); which of "
        "the two is not known"
    )


def _double_free(case: Case) -> str:
    then = ". The next two requests would have got the same page"
    if case.held:
        return "this one free names the page more than once" + then
    before = case.taken
    if before is None:
        return "not known: the first free is older than the page's recorded history" + then
    if before.caller and before.caller == case.event.caller:
        return (
            f"the same code freed the page before, {said(before)}: it ran twice for the same pages"
            + then
        )
    return (
        f"the page was freed before, {said(before)}, and now by {case.event.caller or '?'}: two "
        "places think that they have to give it back" + then
    )


def _never(case: Case) -> str:
    then = "; the page would have been handed out twice"
    held = [p for p in case.event.pages if 0 < p < case.pool.pages and case.pool.held[p]]
    owners = sorted({str(case.pool.owner[p]) for p in held} - {""})
    if owners:
        return (
            f"the same free gives back pages of request {', '.join(owners)}: a wrong index is "
            "among its right ones, so its row of req_to_token is wrong there; who wrote it is not "
            "known" + then
        )
    return (
        "the index is from no allocator: stale, or overwritten; where the caller has it from is "
        "not known" + then
    )


def _continues(case: Case) -> str:
    if case.event.kind == "returned":
        return _replaced(case)
    if case.page == 0 and case.pool.name == "swa":
        tail = case.pool.tails.get(case.event.request, 0)
        evicted = last_of(case.ledger.history("swa", tail), TAKES) if tail > 0 else None
        says = "the mapping of the sequence's last token is 0: its SWA page was taken away"
        return (
            f"{says} {said(evicted, request=False)}" if evicted else f"{says}, by whom is not known"
        )
    if case.taken is not None:
        return (
            f"the page was freed {said(case.taken)}, while the sequence still uses it: look at "
            "that caller"
        )
    return (
        "no hand-out and no free of this page was recorded: the index of the sequence's last token "
        "is wrong, so its row of req_to_token is; who wrote it is not known"
    )


def _mapping(case: Case) -> str:
    given, got = case.ledger.pairs.of(case.page) if case.ledger.pairs is not None else (0, 0)
    swa, full = case.ledger.pools.get("swa"), case.ledger.pools.get("full")
    shared = ""
    if swa is not None and full is not None and 0 < got < swa.pages:
        other = int(swa.partner[got])
        if 0 < other < full.pages and other != case.page and full.held[other]:
            whose = str(full.owner[other])
            shared = f". SWA page {got} already belongs to full page {other}" + (
                f" (request {whose})" if whose else ""
            )
    if case.event.kind == "miswritten":
        return (
            f"the mapping was wrong as soon as {SWA_ALLOCATOR} returned: its SWA pool had handed "
            f"out SWA page {given}, and SWA page {got} was written for it. The allocator wrote it "
            f"so, or what wraps it did{shared}"
        )
    if case.event.kind == "mismatch":
        since = f" {said(case.given)}" if case.given is not None else ""
        return (
            f"the mapping was right when the page was handed out{since}, and was overwritten since "
            f"then, past {SWA_ALLOCATOR}; by whom is not known{shared}"
        )
    return (
        "the mapping was right when the pages were handed out, and was overwritten since then, "
        f"past {SWA_ALLOCATOR}; by whom is not known"
    )


def _maps_freed(case: Case) -> str:
    if case.event.kind == "map":
        freed = f", which was freed {said(case.taken)}" if case.taken is not None else ""
        return (
            f"set_full_to_swa_mapping was given SWA page {case.page}{freed}: the caller kept an "
            "index that it had given back, or never got"
        )
    return (
        f"{case.event.caller or 'the caller'} freed SWA pages in the SWA pool itself, without "
        "free_swa, which clears the mapping"
    )


def _foreign_free(case: Case) -> str:
    wrong = "the request that is being released does not own the page"
    if case.row:
        return (
            f"{wrong}, but {case.row} names it: req_to_token is wrong there; who wrote it is not "
            "known"
        )
    return (
        f"{wrong}, and its row of req_to_token does not name it: "
        f"{case.event.caller or 'the caller'} freed other indices than those of the row"
    )


def frees_locked(event: PageEvent) -> bool:
    """True if the pages are freed where SGLang had the bug of upstream #29352."""
    return "_insert_helper" in event.caller


def _read(case: Case) -> str:
    caller = case.event.caller or "the caller"
    if frees_locked(case.event):
        return (
            f"{caller} gave a node of the prefix cache new pages and freed its old ones, and did "
            "not look whether a running request has the node locked (upstream #29352)"
        )
    return (
        f"{caller} freed it, although SGLang locks what a running request reads: either it did "
        "not look at the lock, or the lock was given up too early; which of the two is not known"
    )


_CAUSES: dict[str, Callable[[Case], str]] = {
    "out-of-range": _no_page,
    "page-zero": _no_page,
    "double-alloc": _double_alloc,
    "double-free": _double_free,
    "free-unallocated": _never,
    "use-after-free": _continues,
    "mapping-mismatch": _mapping,
    "maps-freed": _maps_freed,
    "evicted-in-window": lambda case: decided_by(case.event),
    "foreign-free": _foreign_free,
    "freed-while-read": _read,
}
