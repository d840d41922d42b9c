"""Turns a census that does not add up into a Finding that names owners. Runs only then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Evidence, Finding, Holding, Location
from g4debug.hooking import req_kv
from g4debug.ledger.holders import Holders
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import short
from g4debug.tracers.pool_leak.causes import cause, cause_of_row
from g4debug.tracers.pool_leak.check import Census, Pages
from g4debug.tracers.pool_leak.look import View

NAMED = 8  # pages and holdings that are named one by one
Released = Mapping[str, tuple[int, bool]]
Told = tuple[Finding, Evidence]


def describe(
    pool: str, census: Census, live: list[Any], released: Released, ledger: Ledger, idle: bool
) -> Told:
    """The finding, who holds or lost which pages, and the history of the first bad page."""
    rids, wrong = {str(r.rid): req_kv.row(r) for r in live}, census.wrong()
    holdings = [
        holding
        for state, pages in wrong.items()
        for holding in _by_owner(pool, pages, state, rids, released, ledger)
    ]
    kind = worst(census)
    pages, first, count = wrong[kind], int(wrong[kind][0]), len(wrong[kind])
    events = () if ledger.broken else ledger.history(pool, first)
    largest = next(h for h in holdings if h.state == kind)
    what = f"{count} page{'s' * (count != 1)} of the {pool} pool {'is' if count == 1 else 'are'} "
    what += KINDS["pool-leak"][kind].what
    finding = _finding(
        kind,
        ledger,
        idle,
        f"{what} (page {first}, last owner {largest.owner or 'a request that is not known'})",
        request=largest.owner,
        expected="each page is once in the free list, or held by the prefix cache or a request",
        got=f"{what}: {_list(pages)}",
        owner=f"page {first}: {largest.last or 'nothing is known about it'}",
        history=short(events),
        cause=cause(kind, largest, events, first, ledger),
    )
    return finding, Evidence(holdings=tuple(holdings[:NAMED]), events=events)


def worst(census: Census) -> str:
    """The kind of its finding: pages in use twice corrupt KV, which is worse than lost pages."""
    wrong = census.wrong()
    return next(k for k in sorted(wrong, key=lambda k: k == "leaked") if len(wrong[k]))


def describe_rows(live: list[Any], released: Released, ledger: Ledger) -> Told:
    """The finding about requests that still hold a row although the server is idle."""
    holdings = tuple(
        Holding(
            pool="req_to_token",
            pages=(req_kv.row(r),),
            count=1,
            state="leaked",
            owner=str(r.rid),
            last=f"{req_kv.allocated(r)} tokens allocated, finished: {r.finished()}",
            due=_due(str(r.rid), {}, released, ledger, "", -1),
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
    return finding, Evidence(holdings=holdings)


def describe_free_rows(
    kind: str, rows: Sequence[int], where: str, holders: Holders, ledger: Ledger
) -> Told:
    """The finding about rows that nobody holds and that are not free ("lost rows"), that are free
    twice ("free rows"), or that are free and that there are not ("no rows")."""
    holdings = []
    for row in rows[:NAMED] if where != "no rows" else ():
        page = int(holders.row(row, 1)[0])
        owner = ledger.owner("full", page)
        last = f"its first page is page {page} of the full pool, of {owner or 'nobody known'}"
        holdings.append(Holding("req_to_token", (row,), 1, kind, owner, last))
    count, first = len(rows), rows[0]
    some = f"{count} row{'s' * (count != 1)} of req_to_token {'is' if count == 1 else 'are'} "
    if where == "free rows":
        what = f"{some}in the list of free rows more than once (row {first})"
        cause = (
            "ReqToTokenPool.free was called twice for a request, or the list was overwritten; "
            "which of the two is not known"
        )
    elif where == "no rows":
        what = f"{some}in the list of free rows, and no request may have it (row {first})"
        cause = (
            "the list of free rows was overwritten, or a request was released whose own number of "
            "its row was wrong; which of the two is not known"
        )
    else:
        what = f"{some}neither free nor held by a request (row {first})"
        cause = (
            "a request was dropped without release_kv_cache, or the row was taken out of the list "
            "of free rows; which of the two is not known"
        )
    finding = _finding(
        kind,
        ledger,
        True,
        what,
        request=holdings[0].owner if holdings else "",
        expected="each row is once in the list of free rows, or a request or a session holds it",
        got=f"row{'s' * (count != 1)} {', '.join(map(str, rows[:NAMED]))}",
        cause=cause,
    )
    return finding, Evidence(holdings=tuple(holdings))


def describe_miscounted(view: View, ledger: Ledger, idle: bool) -> Told:
    """The finding about a prefix cache that has a wrong idea of its own size."""
    evictable, protected = view.sizes or (0, 0)
    finding = _finding(
        "miscounted",
        ledger,
        idle,
        f"the prefix cache says that it has {evictable + protected} tokens of the {view.name} "
        f"pool, and its nodes have {view.cached}",
        request="",
        expected="evictable and locked tokens add up to the tokens of the nodes",
        got=f"{evictable} tokens may be evicted and {protected} are locked, but the nodes have "
        f"{view.cached}",
        cause="a node got other slots than its key has tokens, or the count was changed without "
        "the nodes; which of the two is not known",
    )
    return finding, Evidence()


def describe_locked(view: View, pages: Pages, released: Released, ledger: Ledger) -> Told:
    """The finding about nodes that are locked on an idle server. pages: of the full pool."""
    tokens = view.sizes.protected if view.sizes is not None else 0
    holdings = tuple(_by_owner("full", pages, "locked", {}, released, ledger)[:NAMED])
    owner = holdings[0].owner if holdings else ""
    finding = _finding(
        "locked",
        ledger,
        True,
        f"the prefix cache has {tokens} tokens locked in the {view.name} pool, and no request runs"
        + (
            f" (full page {int(pages[0])}, handed out for {owner or 'nobody known'})"
            if len(pages)
            else ""
        ),
        request=owner,
        expected="nothing is locked when the server is idle",
        got=f"{tokens} tokens of the {view.name} pool are locked, in the full pages {_list(pages)}",
        cause="a request ended without giving its lock back (dec_lock_ref), or a lock was taken "
        "twice; which request is not known. These pages can never be evicted",
    )
    return finding, Evidence(holdings=holdings)


def _finding(
    kind: str, ledger: Ledger, idle: bool, what: str, request: str, **words: Any
) -> Finding:
    record = KINDS["pool-leak"][kind]
    return record.finding(
        site="scheduler.on_idle" if idle else "scheduler.process_result",
        headline=f"g4debug: pool-leak {'at idle' if idle else 'while busy'}: {what}",
        location=Location(process="scheduler", step=ledger.recorder.step, request=request),
        **words,
    )


def _by_owner(
    pool: str, pages: Pages, state: str, live: Mapping[str, int], released: Released, ledger: Ledger
) -> list[Holding]:
    """One Holding for each last owner. The one with the most pages comes first.

    live: the row of each request that is live.
    """
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
                due=_due(owner, live, released, ledger, pool, mine[0]) if state == "leaked" else "",
                step=released[owner][0] if owner in released else -1,
            )
        )
    return found


def _due(
    owner: str, live: Mapping[str, int], released: Released, ledger: Ledger, pool: str, page: int
) -> str:
    """The event that should have given the pages back, as far as it is known."""
    if not owner:
        return ""
    if owner in live:
        scheduler = None if ledger.holders is None else ledger.holders.scheduler
        if scheduler is not None and live[owner] in scheduler.req_to_token_pool.free_slots:
            return (
                f"nobody yet: row {live[owner]} of req_to_token, which names them, is in the list "
                f"of free rows, and request {owner} still has it. ReqToTokenPool.free was called "
                "for it, or the list was overwritten; which of the two is not known"
            )
        return _named_by_its_row(owner, pool, page, ledger) or (
            f"whatever removed the page from the row of request {owner}, which is still live"
        )
    if owner in released:
        step, inserted = released[owner]
        how = "the prefix cache or the free list" if inserted else "the free list"
        return f"release_kv_cache in step {step}, into {how}"
    return "release_kv_cache of the request; no call of it was seen"


def _named_by_its_row(owner: str, pool: str, page: int, ledger: Ledger) -> str:
    """Why a page is nobody's although the row of its live request names it; '' if it does not."""
    books, holders, request = ledger.pools.get(pool), ledger.holders, ledger.requests.get(owner)
    if books is None or holders is None or request is None or holders.scheduler is None:
        return ""
    token, row = int(books.position[page]), req_kv.row(request)
    table = holders.scheduler.req_to_token_pool.req_to_token
    if not (0 <= row < table.shape[0] and 0 <= token < table.shape[1]):
        return ""
    cell = holders.row(row, token + 1)[-1:]
    if int((holders.mapped(cell) if pool == "swa" else cell)[0]) != page:
        return ""
    length = req_kv.allocated(request)
    if token >= length:
        return (
            f"nobody: the row of request {owner} names it for token {token}, and its "
            f"kv_allocated_len is {length}, so the release frees no more. That length is too short"
        )
    lengths = "cache_protected_len" + (" or swa_evicted_seqlen" if pool == "swa" else "")
    return (
        f"the prefix cache: the row of request {owner} names it for token {token}, which lies "
        f"before its {lengths}, and no node has it. That length goes too far, or the node was cut, "
        "was lost or became a tombstone; which of them is not known"
    )


def _list(pages: Pages) -> str:
    rest = len(pages) - NAMED
    text = ", ".join(str(int(p)) for p in pages[:NAMED])
    return f"{text} and {rest} more" if rest > 0 else text
