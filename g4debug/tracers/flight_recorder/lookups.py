"""Judges which lookup may have had an index out of range. Pure: plain values only.

Only two things clear a lookup. Its index cannot be out of range at all, because SGLang masks it or
because the host made it and it fits; or the assertion is of another sort of lookup, or of a table
with another number of rows. That an index *should* fit clears nothing: the device made it, and what
the device holds cannot be read any more. Only one thing accuses a lookup: an index that is known,
or that the device may make if nothing is wrong, and that does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from g4debug.findings.record import DeviceAssert, Lookup
from g4debug.tracers.flight_recorder import device_asserts as words

CANNOT, COULD, NOT_KNOWN = "cannot", "could", "not known"


def judge(lookups: Sequence[Lookup], asserts: Sequence[DeviceAssert]) -> tuple[Lookup, ...]:
    """The lookups with ``verdict`` and ``why``: first those that could have been, last the cleared.

    asserts: the printed assertions; empty if they are not known.
    """
    judged = [_judged(lookup, asserts) for lookup in lookups]
    order = (COULD, NOT_KNOWN, CANNOT)
    return tuple(sorted(judged, key=lambda x: order.index(x.verdict)))


def _judged(lookup: Lookup, asserts: Sequence[DeviceAssert]) -> Lookup:
    def verdict(which: str, *why: str) -> Lookup:
        return replace(lookup, verdict=which, why="; ".join(x for x in why if x))

    if lookup.never:
        return verdict(CANNOT, lookup.never)
    elsewhere = _of_another_sort(lookup, asserts)
    if elsewhere:
        return verdict(CANNOT, elsewhere)
    known, fits = lookup.high >= lookup.low, lookup.low >= 0 and lookup.high < lookup.rows
    if not known and lookup.rows < 0:
        return verdict(NOT_KNOWN, "neither the indices nor the table are known", lookup.note)
    if not known:
        return verdict(NOT_KNOWN, "the indices are on the device only", lookup.note)
    indices = f"{lookup.indices} {lookup.low:,} to {lookup.high:,}"
    if lookup.rows < 0:
        return verdict(NOT_KNOWN, f"{indices}; how many rows the table has is not known")
    rows = f"{lookup.rows:,} rows"
    if not fits:
        return verdict(COULD, f"{indices} do not fit {rows}", lookup.note)
    if lookup.exact:
        return verdict(CANNOT, f"{indices} fit {rows}", lookup.note)
    return verdict(NOT_KNOWN, f"{indices} would fit {rows}, but the device made them", lookup.note)


def _of_another_sort(lookup: Lookup, asserts: Sequence[DeviceAssert]) -> str:
    """Why no assertion can be about this lookup. '' if one may be, or if none is known."""
    reasons = [_not_this(lookup, one) for one in asserts]
    return reasons[0] if reasons and all(reasons) else ""


def _not_this(lookup: Lookup, found: DeviceAssert) -> str:
    sorts, where = words.sorts(found), words.place(found)
    if not sorts:
        return f"{where} asserts something else than the index of a lookup"
    if lookup.sorts and not set(sorts) & set(lookup.sorts):
        a, b = (" or ".join(words.WORDS.get(x, x) for x in some) for some in (sorts, lookup.sorts))
        return f"{where} is {a}, and this is {b}"
    size = words.bound(found)
    if size >= 0 and lookup.rows >= 0 and size != lookup.rows:
        return f"the table of the assertion has {size:,} rows, and this one {lookup.rows:,}"
    return ""


def sentence(lookups: Sequence[Lookup]) -> str:
    """One sentence for CAUSE: it accuses one lookup, or it says "not known"."""
    could = [x for x in lookups if x.verdict == COULD]
    if len(could) == 1:
        (one,) = could
        return (
            f"Of the lookups in LOOKUPS, only {one.name} ({one.place}) has indices that do not "
            f"fit its table: {one.why}."
        )
    if could:
        names = ", ".join(x.name for x in could)
        return f"Which lookup it was is not known: the indices of {len(could)} do not fit: {names}."
    if not lookups:
        return "Which lookup it was is not known: the tables of this process could not be read."
    cleared = sum(x.verdict == CANNOT for x in lookups)
    if cleared == len(lookups):
        return f"Which lookup it was is not known: it was none of the {cleared} in LOOKUPS."
    return (
        "Which lookup it was is not known: no index is known that does not fit its table "
        f"({cleared} of the {len(lookups)} in LOOKUPS are cleared)."
    )
