"""A row of ``req_to_token`` names another request's page: is that so, by SGLang's own tables?

The guard suspects it from what the ledger knows (:mod:`g4debug.ledger.owners`). Here it is held
against SGLang: how much of the request lies in the prefix cache, and whether the other request's
own row names the page, too. Two rows that name one page which the prefix cache lent to neither are
wrong, whoever wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4debug.findings.steps import Recorder
from g4debug.hooking import req_kv
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.owners import cached_tokens
from g4debug.tracers.page_table.checked_table import Cell, Launch, rid_at


@dataclass(frozen=True)
class Foreign:
    """One cell whose page belongs to another request.

    row: the row of ``req_to_token`` with the page, and rid its request. page: of the full pool.
    owner: rid of the request that the page was handed out to, owner_row and owner_column: where
    that request's own row names it. own: the page that was handed out to ``rid`` for the tokens of
    the cell and is still held; -1 if none is known.
    """

    row: int
    rid: str
    page: int
    owner: str
    owner_row: int
    owner_column: int
    own: int


def confirm(
    launch: Launch, cell: Cell, recorder: Recorder, ledger: Ledger | None
) -> tuple[Foreign | None, str]:
    """What SGLang's tables say of a FOREIGN cell, or None and why it is not confirmed.

    Reads the device. Raises RuntimeError if that is lost.
    """
    pool = ledger.pools.get("full") if ledger is not None else None
    if ledger is None or pool is None or ledger.owners is None or ledger.broken:
        return None, "the page ledger was given up"
    size = launch.page_size
    table, at = launch.backend.req_to_token, cell.column * size
    if cell.step >= 0:
        row, page, rid = cell.request, cell.full, rid_at(recorder, cell)
    else:
        row = int(launch.req_pool_indices[cell.row])
        page = int(table[row, at]) // size
        rid = recorder.requests_by_pool_index().get(row, "")
    if not 0 < page < pool.pages or int(table[row, at]) // size != page:
        return None, f"row {row} of req_to_token does not name it any more"
    ledger.settle(wait=True)
    request = ledger.requests.get(rid)
    if request is None:
        return None, f"the request of row {row} is not known"
    if cached_tokens(request) > at:
        return None, f"token {at} of request {rid} lies in the prefix cache"
    owner, owner_row = str(pool.owner[page]), int(ledger.owners.pages[page])
    column = int(pool.position[page]) // size
    if not owner or owner == rid or column < 0 or not 0 < owner_row < len(table):
        return None, f"page {page} is not known to be another request's"
    holder = ledger.requests.get(owner)
    if holder is None or req_kv.row(holder) != owner_row:
        return None, f"request {owner} does not hold row {owner_row} any more"
    if column * size >= req_kv.allocated(holder):
        return None, f"request {owner} has no room for token {column * size} any more"
    if int(table[owner_row, column * size]) // size != page:
        return None, f"row {owner_row} of request {owner} does not name page {page}"
    mine = (pool.owner == rid) & (pool.position == at) & pool.held
    own = mine.nonzero()[0]
    found = int(own[-1]) if len(own) else -1
    return Foreign(row, rid, page, owner, owner_row, column, found), ""
