"""Whether an autopsy names what a fault has broken, as the fault's line in the log tells it."""

from __future__ import annotations

import re

from g4debug.findings.record import TrapRecord

# What a fault's line in the log says: "swa table row 2 column 7 = 10000742", and of a list alike.
BROKEN = re.compile(r"-oob #1: \S+ \S+: (\S+) (table|list) row (\d+) \w+ \d+ = (\d+)")
POOLS = {
    "window": "swa"
}  # which pool the layers read that a list is for, where that is not its name
GONE = "no register has the address any more"


def agrees(record: TrapRecord, log: str, *, written_over: bool = False) -> None:
    """The autopsy names the page, its pool, the token in it and the row, or this fails.

    written_over: the kernel of this case may have written over the registers that had the address.
    Then, and only then, the autopsy may say that it names no page; but it must name the pool.
    """
    found = BROKEN.search(log)
    assert found is not None, log[-3000:]
    assert record.autopsy is not None
    assert record.memory is not None
    pool, kind = POOLS.get(found[1], found[1]), found[2]
    row, value = int(found[3]), int(found[4])
    told, notes = record.autopsy, " ".join(record.autopsy.notes)
    if written_over and GONE in told.verdict:
        assert told.page == told.pages == -1
        # Of a kernel whose grid does not have the batch, the row is not known.
        assert told.row in (-1, row)
        assert f"({pool} pool)" in told.verdict
        return
    assert GONE not in told.verdict, told
    # The layer is one of this model, in its pool.
    buffers = [b for b in record.memory.kv if (b.pool, b.layer) == (told.pool, told.layer)]
    assert buffers, told
    assert told.pool == pool, told
    assert told.pages == buffers[0].pages, told
    # A list has tokens, a table has pages, of which a kernel reads all tokens.
    size = buffers[0].page_size
    page, token = divmod(value, size) if kind == "list" else (value, told.token)
    assert 0 <= told.token < size, told
    if "only the distance tells" in notes:  # which buffer: then the right one is told as another
        assert "most likely" in told.verdict, told
        assert f"page {page} of" in f"{told.verdict} {notes}", told
    else:
        assert (told.page, told.token) == (page, token), told
    assert told.row == row or (told.row < 0 and record.steps[-1].forward_mode == "EXTEND"), told
    if told.row >= 0:
        rids = {step.rids[row] for step in record.steps[-2:] if row < len(step.rids)}
        assert told.request in rids or "whose row that is" in notes, told
