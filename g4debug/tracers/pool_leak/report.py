"""Turns a census that does not add up into a Finding that names owners. Runs only then."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from g4debug.findings.kinds import KINDS, FindingKind
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
    rids = {str(r.rid) for r in live}
    holdings = [
        *_by_owner(pool, census.leaked, "leaked", rids, released, ledger),
        *_by_owner(pool, census.double, "double", rids, released, ledger),
        *_by_owner(pool, census.repeated, "repeated", rids, released, ledger),
        *_by_owner(pool, census.outside, "outside", rids, released, ledger),
    ]
    record, pages = _worst(census)
    kind, words = record.name, record.what
    first = int(pages[0])
    events = () if ledger.broken else ledger.history(pool, first)
    worst = next(h for h in holdings if h.state == kind)
    count = len(pages)
    what = f"{count} page{'s' * (count != 1)} of the {pool} pool {'is' if count == 1 else 'are'}"
    owner = worst.owner or "a request that is not known"
    finding = Finding(
        check="pool-leak",
        kind=record.name,
        site="scheduler.on_idle" if idle else "scheduler.process_result",
        headline=f"g4debug: pool-leak {'at idle' if idle else 'while busy'}: {what} {words} "
        f"(page {first}, last owner {owner})",
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=ledger.recorder.rank,
            step=ledger.recorder.step,
            request=worst.owner,
        ),
        expected="each page is once in the free list, or held by the prefix cache or a request",
        got=f"{what} {words}: {_list(pages)}",
        owner=f"page {first}: {worst.last or 'nothing is known about it'}",
        history=short(events),
        cause=cause(kind, worst, events, first, ledger),
        reference=record.reference,
        next_command=record.command,
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
    record = KINDS["pool-leak"]["row"]
    rids = ", ".join(str(r.rid) for r in live[:NAMED])
    count = len(live)
    who = "1 request still holds" if count == 1 else f"{count} requests still hold"
    finding = Finding(
        check="pool-leak",
        kind=record.name,
        site="scheduler.on_idle",
        headline=f"g4debug: pool-leak at idle: {who} a row of req_to_token, with its pages "
        f"(request {live[0].rid})",
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=ledger.recorder.rank,
            step=ledger.recorder.step,
            request=str(live[0].rid),
        ),
        expected="all rows are given back when the server is idle",
        got=f"rows of these requests: {rids}",
        cause=cause_of_row(str(live[0].rid), released),
        reference=record.reference,
        next_command=record.command,
    )
    return finding, holdings


def _worst(census: Census) -> tuple[FindingKind, Pages]:
    """Kind and pages of the worst part. What corrupts KV is worse than what is lost."""
    kinds = KINDS["pool-leak"]
    if len(census.double):
        return kinds["double"], census.double
    if len(census.repeated):
        return kinds["repeated"], census.repeated
    if len(census.outside):
        return kinds["outside"], census.outside
    return kinds["leaked"], census.leaked


def _by_owner(
    pool: str,
    pages: Pages,
    state: str,
    live: set[str],
    released: Released,
    ledger: Ledger,
) -> list[Holding]:
    """One Holding for each last owner. The one with the most pages comes first."""
    groups: dict[str, list[int]] = {}
    for page in pages.tolist():
        owner = ledger.owner(pool, page)
        groups.setdefault(owner, []).append(page)
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
