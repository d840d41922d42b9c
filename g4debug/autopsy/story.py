"""Why a kernel may have got a page, and what the dump has of that page, its request and row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from g4debug.findings.kinds import KINDS
from g4debug.findings.memory_map import MemoryRange
from g4debug.findings.record import Held, PageEvent, TrapRecord

SHOWN = 8  # events and steps of the dump
ALL_BITS = 1 << 20  # from here on, a page number of nothing but set bits is no real one
LARGEST_INT32 = 0x7FFF_FFFF
_KINDS = KINDS["page-table"]
# Headings in TRIAGE.md: a wrong page, and a case of that.
WRONG = (_KINDS["out-of-range"].entry,)
UNTRANSLATED = (*WRONG, _KINDS["full-index-in-swa-table"].entry)


def cause(
    buffer: MemoryRange, page: int, token: int, record: TrapRecord | None
) -> tuple[str, tuple[str, ...]]:
    """Why a kernel may have got such a page, and which entries of TRIAGE.md that fits.

    ('', ()) if the numbers alone fit nothing.
    """
    at = page * buffer.page_size + token
    if LARGEST_INT32 in (page, at) or page * buffer.page_size == LARGEST_INT32 + 1:
        return f"the index is {LARGEST_INT32:#x}, the largest int32: it was never written", WRONG
    if page < 0:
        return (
            f"the index is negative (page {page}, token {at}): a padding or a wrong difference",
            WRONG,
        )
    memory = record.memory if record is not None else None
    others = {(r.pool, r.runner, r.pages) for r in memory.kv} if memory is not None else set()
    larger = sorted(o for o in others if o[2] > page and o[2] > buffer.pages)
    for pool, runner, pages in larger:
        if (pool, buffer.pool) == ("full", "swa"):
            return (
                f"page {page} is in the full pool ({pages} pages) and not in the SWA pool "
                f"({buffer.pages} pages): this fits a table that was not translated",
                UNTRANSLATED,
            )
        whose = "the draft's" if runner == "draft" else "the"
        return f"page {page} is in {whose} {pool} pool ({pages} pages) and not in this one", WRONG
    if page >= ALL_BITS and page & (page + 1) == 0:
        return (
            f"page {page} is {page:#x}: all its bits are set, as where an index that was never "
            "written (0x7fffffff, -1) is multiplied",
            WRONG,
        )
    if page > 4 * max((o[2] for o in others), default=buffer.pages):
        return f"no pool has a page {page}: the index was not written, or was overwritten", WRONG
    return "", ()


def history(
    buffer: MemoryRange, page: int, request: str, record: TrapRecord | None
) -> Iterator[str]:
    """What the dump has of that page, and of the request in that row."""
    if record is None:
        return
    yield from _held(page, request, record)
    events = (*record.events, *record.allocator)
    of_page = [e for e in events if page in e.pages]
    for event in of_page[-SHOWN:]:
        yield _event(event)
    if not of_page and events and page >= 0:
        cut = sum(e.count > len(e.pages) for e in events)
        but = f"; {cut} of them have more pages than are noted" if cut else ""
        yield f"the dump's {len(events)} last events of the allocator have no page {page}{but}"
    if request:
        for event in [e for e in events if e.request == request and e not in of_page][-SHOWN:]:
            yield _event(event)
        yield from _steps(request, record)


def _held(page: int, request: str, record: TrapRecord) -> Iterator[str]:
    """Who holds a page of that number, and which pages the request in that row holds.

    A request also reads pages of others, which the prefix cache lends it; the ledger has them under
    the request that they were handed out for.
    """
    if not record.held:
        return
    cut = any(h.is_cut for h in record.held)
    holders = [h for h in record.held if h.has(page)]
    for h in holders[:SHOWN]:
        row = ", the request in that row" if h.request == request else ""
        yield (
            f"by the ledger, page {page} of the {h.pool} pool was handed out for {h.request}{row}, "
            "and not freed since"
        )
    if not holders and page >= 0:
        yield (
            f"by the ledger, no request of the last two steps was given a page {page}, of any pool"
            + ("; they hold more pages than the dump has room for" if cut else "")
        )
    for h in record.held:
        if h.request == request and request:
            yield (
                f"by the ledger, {_counted(h.count)} of the {h.pool} pool handed out for {request} "
                f"and not freed{_named(h)}"
            )


def _named(h: Held) -> str:
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in h.pairs[:SHOWN]]
    more = ", …" if len(h.pairs) > SHOWN or h.is_cut else ""
    return f": {', '.join(shown)}{more}" if shown else ""


def _counted(pages: int) -> str:
    return f"{pages} page{'s' * (pages != 1)}"


def _event(event: PageEvent) -> str:
    of = f" for {event.request}" if event.request else ""
    by = f" by {event.caller}" if event.caller else ""
    shown = ", ".join(map(str, event.pages[:SHOWN]))
    pages = _counted(event.count)
    return f"step {event.step}: {event.kind} of {pages} ({shown}) of {event.pool}{of}{by}"


def _steps(request: str, record: TrapRecord) -> Iterator[str]:
    mine = [s for s in record.steps if request in s.rids][-3:]
    for step in mine:
        at = step.rids.index(request)
        parts: Sequence[tuple[str, tuple[int, ...]]] = (
            ("tokens", step.seq_lens),
            ("allocated", step.allocated),
            ("evicted", step.evicted),
        )
        told = ", ".join(f"{name} {values[at]}" for name, values in parts if at < len(values))
        yield f"step {step.step} ({step.forward_mode}): row {at} of {len(step.rids)}, {told}"
