"""The GPU tests' check of an autopsy fails where that names nothing, or something else."""

from __future__ import annotations

import dataclasses

import named_pages
import pytest

from g4debug.findings.memory_map import KV, MemoryMap, MemoryRange
from g4debug.findings.record import Autopsy, Finding, Location, Step, TrapRecord

pytestmark = pytest.mark.once("an autopsy is compared without SGLang")

PAGE, SIZE = 65536, 64  # bytes and tokens of a page
TABLE = "g4debug fault (seed=3) page-oob #1: draft replay: swa table row 2 column 7 = 10000742 [s"
LIST = (
    "g4debug fault (seed=3) token-oob #1: target decode: window list row 2 entry 9 = 640000130 [s"
)
NAMED = Autopsy(
    "core", "page 10000742 of V, layer 3, row 2 of the batch, request c",
    pool="swa", layer=3, part="V", page=10_000_742, pages=373, token=0, row=2, request="c",
)  # fmt: skip
GONE = Autopsy(
    "core",
    "not known: the kernel was given K of layer 3 (swa pool); no register has the address any more",
)


def record(autopsy: Autopsy, mode: str = "DECODE") -> TrapRecord:
    finding = Finding("flight-recorder", "cuda-error", "", "g4debug: died", Location(), "", "")
    kv = tuple(
        MemoryRange(
            (n + 1) << 30, pages * PAGE, KV, pool=pool, layer=n, part="K",
            page_bytes=PAGE, page_size=SIZE,
        )
        for n, (pool, pages) in enumerate([("full", 1024)] * 3 + [("swa", 373)])
    )  # fmt: skip
    steps = tuple(Step(n, mode, ("a", "b", "c"), (300,) * 3) for n in (6, 7))
    memory = MemoryMap(kv, segments=True)
    return TrapRecord(finding, "", memory=memory, steps=steps, autopsy=autopsy)


def named(**changes: object) -> Autopsy:
    return dataclasses.replace(NAMED, **changes)  # type: ignore[arg-type]


def test_what_was_broken_is_named():
    named_pages.agrees(record(NAMED), TABLE)
    named_pages.agrees(record(named(page=10_000_002, token=2)), LIST)
    unrowed = named(row=-1, request="")
    named_pages.agrees(record(unrowed, "EXTEND"), TABLE)


def test_a_page_that_only_the_distance_tells_may_be_told_as_that_of_another_buffer():
    other = named(
        page=9_999_900,
        verdict="most likely page 9999900 of V, layer 3",
        notes=(
            "only the distance tells which buffer was meant; it may also be page 10000742 of K",
        ),
    )
    named_pages.agrees(record(other), TABLE)
    surely = dataclasses.replace(other, verdict="page 9999900 of V, layer 3")
    with pytest.raises(AssertionError):
        named_pages.agrees(record(surely), TABLE)


def test_an_autopsy_that_names_nothing_fails_unless_the_case_says_that_it_may():
    """It used to pass for each case."""
    for told in (GONE, dataclasses.replace(GONE, row=2)):
        with pytest.raises(AssertionError):
            named_pages.agrees(record(told), TABLE)
        named_pages.agrees(record(told), TABLE, written_over=True)
    for told in (
        dataclasses.replace(GONE, row=1),
        dataclasses.replace(GONE, page=10_000_742, pages=373),
        dataclasses.replace(GONE, verdict=GONE.verdict.replace("swa", "full")),
        named(page=384),  # that it may name none does not excuse a wrong one
    ):
        with pytest.raises(AssertionError):
            named_pages.agrees(record(told), TABLE, written_over=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"page": 384},
        {"page": -1, "pages": -1},
        {"pool": "full", "layer": 2, "pages": 1024},
        {"pool": "", "layer": -1},
        {"pages": 1024},
        {"token": -1},
        {"token": 64},
        {"row": 1},
        {"row": -1},
        {"request": "b"},
    ],
    ids=str,
)
def test_something_else_fails(changes):
    with pytest.raises(AssertionError):
        named_pages.agrees(record(named(**changes)), TABLE)


@pytest.mark.parametrize("changes", [{"token": 3}, {"page": 10_000_003}], ids=str)
def test_another_token_of_a_list_fails(changes):
    told = named(**{"page": 10_000_002, "token": 2, **changes})
    with pytest.raises(AssertionError):
        named_pages.agrees(record(told), LIST)
