"""Turns a violation at an insert or a hand-out of the prefix cache into a Finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Finding, Location, PageEvent
from g4debug.hooking import prefix_tree
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import TAKES, last_of, said, short
from g4debug.tracers.prefix_cache.check import Violation
from g4debug.tracers.prefix_cache.confirm import holder_of
from g4debug.tracers.prefix_cache.contents import Contents, Entry
from g4debug.tracers.prefix_cache.digests import Digests

MOVED = "the request's last_node is another one than it had, for as many tokens"


@dataclass(frozen=True)
class Case:
    """One violation, and the facts about it. request: the one that hands pages over or gets them,
    '' if it is not known. digests: of its pages, as far as they were made. node: the last node of
    the prefix that is handed out, None at an insert. site: the hook that saw it, if nothing is
    handed out."""

    ledger: Ledger
    tree: Any
    violation: Violation
    request: str
    digests: Digests
    contents: Contents
    node: Any
    site: str = "cache.insert"

    @property
    def entry(self) -> Entry | None:
        return self.contents.entry(self.violation.page)

    @property
    def tokens(self) -> str:
        size = int(self.tree.page_size)
        begin = self.violation.column * size
        return f"tokens {begin}..{begin + size - 1}"

    @property
    def who(self) -> str:
        return f"request {self.request}" if self.request else "a request that is not known"


def describe(case: Case) -> tuple[Finding, tuple[PageEvent, ...]]:
    """The finding, and the history of the page that is wrong."""
    record = KINDS["prefix-cache"][case.violation.kind]
    page = case.violation.page
    ledger = case.ledger
    events = () if ledger.broken or page < 0 else ledger.history("full", page)
    out = case.node is not None
    where = _node(case) if out else ""
    verb = "gives" if out else "gets"
    of = f" for {case.tokens} of {case.who}" if out else f" from {case.who} as {case.tokens}"
    what = f"the prefix cache {verb} {_page(case)}{of}, {record.what}"
    if page < 0 and case.violation.got:
        what = f"{record.what}: {case.violation.got}" if out else f"{case.who} {record.what}"
    if case.violation.right >= 0:
        what = f"the row of {case.who} names {_page(case)} for {case.tokens}, {record.what}"
    step = ledger.transport.step
    finding = record.finding(
        site="cache.match" if out else case.site,
        headline=f"g4debug: prefix-cache: {what}{where}",
        location=Location(
            process="scheduler",
            step=ledger.recorder.event_step if step is None else step,
            request=case.request,
            column=case.violation.column,
        ),
        expected=_expected(case, record.expected),
        got=_got(case),
        owner=_owner(case),
        history=short(events),
        cause=_cause(case, events),
    )
    return finding, events


def _expected(case: Case, by_kind: str) -> str:
    right = case.violation.right
    return by_kind if right < 0 else f"page {right}, which is {by_kind}"


def _page(case: Case) -> str:
    return f"full page {case.violation.page}"


def _node(case: Case) -> str:
    """The node that the page is in, as far as the tree tells."""
    begin = case.violation.column * int(case.tree.page_size)
    nodes = prefix_tree.path(case.tree, case.node)
    at = next((n for n in nodes if n.begin <= begin < n.end), None)
    return "" if at is None else f" (node {at.id}, tokens {at.begin}..{at.end - 1})"


def _handed_over(entry: Entry | None, size: int) -> str:
    if entry is None:
        return "nobody is known to have handed it over"
    by = f"request {entry.request}" if entry.request else "a request that is not known"
    begin = entry.column * size
    return f"{by} handed it over in step {entry.step} as its tokens {begin}..{begin + size - 1}"


def _got(case: Case) -> str:
    if case.violation.page < 0 and case.violation.got:
        return case.violation.got
    more = f": {case.violation.got}" if case.violation.got else ""
    return f"{_page(case)}{more}; {_handed_over(case.entry, int(case.tree.page_size))}"


def _owner(case: Case) -> str:
    page, pool = case.violation.page, case.ledger.pools["full"]
    if not 0 < page < pool.pages:
        return "" if page < 0 else f"no pool hands out a page {page}"
    whom = str(pool.owner[page]) or "a request that is not known"
    state = "is held; it was handed out for" if pool.held[page] else "is free; it was held by"
    return f"page {page} {state} {whom}"


def _cause(case: Case, events: tuple[PageEvent, ...]) -> str:
    kind, entry = case.violation.kind, case.entry
    if kind == "lent-row":
        return _row_or_node(case)
    if kind == "beyond":
        return (
            "a part of a prompt that was not computed is handed over: a chunk that got no room in "
            "its round (upstream #24252), or a length that counts too much; which of the two is "
            "not known"
        )
    if kind == "protected":
        return (
            "cache_protected_len or last_node was changed since the request matched or inserted "
            "its prefix; which of the two is not known. SGLang frees and inserts what lies behind "
            "it: pages are lost, or freed twice"
        )
    if kind == "other-key":
        return (
            "the key of the insert was made of other tokens, or changed on its way, or the "
            "request's own tokens were changed; which of them is not known"
        )
    if kind == "length":
        return "the node's value was overwritten or cut; by whom is not known"
    if kind == "wrong-page" or kind == "holds-other":
        if entry is not None and entry.request and entry.request == case.request:
            return (
                "pages of one request are exchanged or shifted: its row of req_to_token is wrong, "
                "or the node's value is; which of the two is not known"
            )
        if kind == "wrong-page":
            return (
                "a node of the prefix cache has a page that was never handed over for its tokens: "
                "its value was overwritten, or it was given another node's; by whom is not known"
            )
        return (
            "the request's row of req_to_token names a page of the prefix cache that it did not "
            "get from there; who wrote it is not known"
        )
    if kind == "freed" or kind == "freed-page":
        other = holder_of(case.ledger, case.violation.page, case.request)
        since = f", and request {other} has it now" if other else ""
        freed = last_of(events, TAKES)
        if freed is None:
            return f"no free of the page was recorded{since}"
        return f"the page was freed {said(freed)}{since}: look at that caller"
    if kind == "foreign":
        return (
            f"the request's row of req_to_token names a page of request "
            f"{case.ledger.owner('full', case.violation.page)}, which still runs; who wrote it is "
            "not known"
        )
    return (
        "the request's row of req_to_token, or what was copied from it, is wrong there; which of "
        "the two is not known"
    )


def _row_or_node(case: Case) -> str:
    """The two differ: which of them is wrong is told by what the pages hold."""
    found, holds = case.violation, case.contents.digest
    column, pages = found.column, (found.page, found.right)
    pool = case.ledger.pools["full"]
    if 0 < found.page < pool.pages and not pool.held[found.page] and not case.ledger.broken:
        freed = last_of(case.ledger.history("full", found.page), TAKES)
        since = "" if freed is None else f" (freed {said(freed)})"
        return (
            f"the page in the row is free{since}: the row was overwritten, or the prefix cache "
            "freed and replaced the page while the request had it locked (upstream #29352, in "
            "0.5.12.post1); which of the two is not known"
        )
    if found.page == found.right:
        return "the row was overwritten inside of the page, or the node was; which is not known"
    if column < len(case.digests) and all(0 < page < len(holds) for page in pages):
        row_holds, node_holds = (bool(holds[page] == case.digests[column]) for page in pages)
        if node_holds and not row_holds:
            return (
                "the request's row of req_to_token was overwritten after the prefix cache had "
                "lent it that page; by whom is not known"
            )
        if row_holds and not node_holds and MOVED in found.got:
            return (
                "the request's last_node was changed without a match or an insert; by whom is not "
                "known. SGLang would unlock that node at its end, and not the one that it locked"
            )
        if row_holds and not node_holds:
            return (
                "the node's value was overwritten while the request had it locked; by whom is not "
                "known"
            )
    return (
        "the request's row of req_to_token was overwritten, or the node's value was; which of the "
        "two is not known"
    )
