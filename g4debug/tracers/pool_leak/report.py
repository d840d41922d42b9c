"""Turns a census that does not add up into a Finding that names owners. Runs only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Finding, Holding, Location, PageEvent
from g4debug.hooking import req_kv
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import short
from g4debug.tracers.pool_leak.causes import cause, cause_of_row
from g4debug.tracers.pool_leak.check import Census, Pages

NAMED = 8  # pages and holdings that are named one by one
Released = Mapping[str, tuple[int, bool]]


def describe(
    pool: str, census: Census, live: list[Any], released: Released, ledger: Ledger, idle: bool
) -> tuple[Finding, tuple[Holding, ...], tuple[PageEvent, ...]]:
    """The finding, who holds or lost which pages, and the history of the first bad page."""
    rids, wrong = {str(r.rid) for r in live}, census.wrong()
    holdings = [
        holding
        for state, pages in wrong.items()
        for holding in _by_owner(pool, pages, state, rids, released, ledger)
    ]
    # What corrupts KV is worse than what is lost.
    kind = next(k for k in sorted(wrong, key=lambda k: k == "leaked") if len(wrong[k]))
    pages, first, count = wrong[kind], int(wrong[kind][0]), len(wrong[kind])
    events = () if ledger.broken else ledger.history(pool, first)
    worst = next(h for h in holdings if h.state == kind)
    what = f"{count} page{'s' * (count != 1)} of the {pool} pool {'is' if count == 1 else 'are'} "
    what += KINDS["pool-leak"][kind].what
    finding = _finding(
        kind,
        ledger,
        idle,
        f"{what} (page {first}, last owner {worst.owner or 'a request that is not known'})",
        request=worst.owner,
        expected="each page is once in the free list, or held by the prefix cache or a request",
        got=f"{what}: {_list(pages)}",
        owner=f"page {first}: {worst.last or 'nothing is known about it'}",
        history=short(events),
        cause=cause(kind, worst, events, first, ledger),
    )
    return finding, tuple(holdings[:NAMED]), events


def describe_rows(
    live: list[Any], released: Released, ledger: Ledger
) -> tuple[Finding, tuple[Holding, ...]]:
    """The finding about requests that still hold a row although the server is idle."""
    holdings = tuple(
        Holding(
            pool="req_to_token",
            pages=(req_kv.row(r),),
            count=1,
            state="leaked",
            owner=str(r.rid),
            last=f"{req_kv.allocated(r)} tokens allocated, finished: {r.finished()}",
            due=_due(str(r.rid), set(), released),
        )
        for r in live
    )
    first, count = str(live[0].rid), len(live)
    who = "1 request still holds" if count == 1 else f"{count} requests still hold"
    finding = _finding(
        "row",
        ledger,
        True,
        f"{who} a row of req_to_token, with its pages (request {first})",
        request=first,
        expected="all rows are given back when the server is idle",
        got=f"rows of these requests: {', '.join(str(r.rid) for r in live[:NAMED])}",
        cause=cause_of_row(first, released),
    )
    return finding, holdings


def _finding(
    kind: str, ledger: Ledger, idle: bool, what: str, request: str, **words: Any
) -> Finding:
    record = KINDS["pool-leak"][kind]
    return Finding(
        check="pool-leak",
        kind=record.name,
        site="scheduler.on_idle" if idle else "scheduler.process_result",
        headline=f"g4debug: pool-leak {'at idle' if idle else 'while busy'}: {what}",
        location=Location(process="scheduler", step=ledger.recorder.step, request=request),
        reference=record.reference,
        next_command=record.command,
        **words,
    )


def _by_owner(
    pool: str, pages: Pages, state: str, live: set[str], released: Released, ledger: Ledger
) -> list[Holding]:
    """One Holding for each last owner. The one with the most pages comes first."""
    groups: dict[str, list[int]] = {}
    for page in pages.tolist():
        groups.setdefault(ledger.owner(pool, page), []).append(page)
    found = []
    for owner, mine in sorted(groups.items(), key=lambda g: -len(g[1])):
        events = ledger.history(pool, mine[0])
        last = events[-1] if events else None
        found.append(
            Holding(
                pool=pool,
                pages=tuple(mine[:NAMED]),
                count=len(mine),
                state=state,
                owner=owner,
                last=f"{last.kind} in step {last.step}, {last.caller}" if last else "",
                due=_due(owner, live, released) if state == "leaked" else "",
                step=released[owner][0] if owner in released else -1,
            )
        )
    return found


def _due(owner: str, live: set[str], released: Released) -> str:
    """What should have given the pages back, as far as that is known."""
    if not owner:
        return ""
    if owner in live:
        return f"whatever removed the page from the row of request {owner}, which is still live"
    if owner in released:
        step, inserted = released[owner]
        how = "the prefix cache or the free list" if inserted else "the free list"
        return f"release_kv_cache in step {step}, into {how}"
    return "release_kv_cache of the request; no call of it was seen"


def _list(pages: Pages) -> str:
    rest = len(pages) - NAMED
    text = ", ".join(str(int(p)) for p in pages[:NAMED])
    return f"{text} and {rest} more" if rest > 0 else text
