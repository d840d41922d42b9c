"""Asks SGLang's own structures whether our records of a page are right.

Violations that follow from SGLang's own calls need no second source: slots that are no whole page,
a page twice, tokens that have no KV, and a page that is handed out for other tokens than it was
handed over for. Violations that rest on our record of the allocators need one: our hooks may have
missed a free or a hand-out. Waits for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from g4debug.findings.kinds import KINDS
from g4debug.hooking import req_kv
from g4debug.ledger import cache_tree
from g4debug.ledger.holders import Holders, finish
from g4debug.ledger.ledger import Ledger
from g4debug.tracers.prefix_cache.check import Violation


def is_real(ledger: Ledger, tree: Any, violation: Violation, request: str) -> bool:
    """True if SGLang's structures say the same. request: who hands the page over, or gets it."""
    holders, page, kind = ledger.holders, violation.page, violation.kind
    if not KINDS["prefix-cache"][kind].suspicion:
        return True
    slots = 0
    if ledger.late or kind == "holds-other":
        cached = finish(cache_tree.read(tree)).full
        slots = int((cached // tree.page_size == page).sum())
    if ledger.late and not slots:
        # By now the page may have been freed rightly: as a duplicate, or because it was evicted.
        # But if a node still has a page, nobody may have freed or got it.
        return False
    match kind:
        case "holds-other":
            # A page that is judged late is in the prefix cache itself by now.
            return slots > (tree.page_size if ledger.late else 0)
        case "freed":
            return holders is not None and _is_free(holders, page)
        case "freed-page":
            return holders is not None and (
                _is_free(holders, page) or bool(holder_of(ledger, page, request))
            )
        case "foreign":
            return bool(holder_of(ledger, page, request))
        case "misplaced":
            return _another_belongs_there(ledger, violation, request)
    raise ValueError(f"no way to confirm a {kind}")


def _is_free(holders: Holders, page: int) -> bool:
    return bool(holders.is_given_back("full", np.array([page])).any())


def holder_of(ledger: Ledger, page: int, but: str) -> str:
    """Another request that holds the page, by its own row of ``req_to_token`` and not because the
    prefix cache lent it; '' if there is none."""
    holders = ledger.holders
    rid = ledger.owner("full", page)
    other = ledger.requests.get(rid)
    if holders is None or holders.scheduler is None or other is None or rid == but:
        return ""
    row, lent = req_kv.row(other), req_kv.protected(other)
    if row < 0 or lent is None or other.finished():
        return ""
    pages = holders.row(row, req_kv.allocated(other))
    return rid if page in pages[lent // holders.page_size :] else ""


def _another_belongs_there(ledger: Ledger, violation: Violation, request: str) -> bool:
    """The request holds another page that was handed out for these tokens."""
    pool, holders = ledger.pools["full"], ledger.holders
    token = violation.column * pool.page_size
    mine = (pool.owner == request) & pool.held & (pool.position == token)
    rightful = mine.nonzero()[0]
    if holders is None or not len(rightful) or violation.page in rightful:
        return False
    return not bool(holders.is_free("full", rightful).any())
