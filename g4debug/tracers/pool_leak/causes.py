"""The likely cause of pages that a census finds wrong, from their history."""

from __future__ import annotations

from collections.abc import Mapping

from g4debug.findings.record import Holding, PageEvent
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import GIVES, TAKES, last_of, said

_PAST = (
    "the free list was changed without free(), or the free is older than the recorded history; "
    "which of the two is not known"
)


def cause(
    kind: str, holding: Holding, events: tuple[PageEvent, ...], page: int, ledger: Ledger
) -> str:
    """The likely cause, in words.

    holding: of the first bad page. events: the history of that page, oldest first.
    """
    given, since = _since(events)
    if kind == "leaked":
        freed = last_of(since, TAKES)
        if freed is not None:
            return (
                f"the page was freed {said(freed)}, and is not in the free list any more: that was "
                "changed without an allocation, or what was freed never got into it; which of the "
                "two is not known"
            )
        if not holding.due:
            return "not known: the ledger does not know whose pages they were"
        return f"should have been freed by: {holding.due}"
    if kind == "double":
        then = "; the next owner will overwrite the old one's KV"
        freed = last_of(since, TAKES)
        if freed is None:
            return f"no free of the page was recorded{given}: {_PAST}{then}"
        return f"the page was freed {said(freed)}, while somebody still uses it{then}"
    if kind == "repeated":
        then = "; two requests will be given the same page"
        frees = [e for e in since if e.kind in TAKES]
        if len(frees) < 2:
            return f"no second free of the page was recorded{given}: {_PAST}{then}"
        return f"the page was freed twice, {said(frees[-2])} and {said(frees[-1])}{then}"
    if kind == "shared":
        return (
            f"a node of the prefix cache was given a page that another node has{given}: at an "
            "insert, or its value was overwritten; which of the two is not known. prefix-cache "
            "tells it as soon as the page is used"
        )
    freed = ledger.log.last_naming(holding.pool, page, TAKES)
    if freed is None:
        return f"no free of this index was recorded: {_PAST}"
    return f"an index that is no page of this pool was freed {said(freed)}"


def _since(events: tuple[PageEvent, ...]) -> tuple[str, tuple[PageEvent, ...]]:
    """When the page was handed out last, in words, and what happened after that."""
    given = last_of(events, GIVES)
    if given is None:
        return "", events
    return f" since it was handed out {said(given)}", events[events.index(given) + 1 :]


def cause_of_row(rid: str, released: Mapping[str, tuple[int, bool]]) -> str:
    """The likely cause of a row that a request still holds on an idle server."""
    if rid in released:
        return (
            f"release_kv_cache was called for request {rid} in step {released[rid][0]}, but did "
            "not reach ReqToTokenPool.free"
        )
    return (
        f"no call of release_kv_cache was seen for request {rid}: it was dropped without being "
        "released; by whom is not known"
    )
