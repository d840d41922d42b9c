"""Records of any contents, for hypothesis; and equality that looks into arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from g4debug.findings.memory_map import MemoryMap, MemoryRange
from g4debug.findings.record import (
    Autopsy,
    DeviceAssert,
    Finding,
    Location,
    Lookup,
    OtherHook,
    Pool,
    RequestEvent,
    Step,
    Table,
    Tape,
    TrapRecord,
)
from g4debug.findings.status import Checked, Limit, TracerStatus

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=12)
plain = st.one_of(TEXT, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none())
locations = st.builds(
    Location,
    process=TEXT,
    pid=st.integers(),
    step=st.integers(),
    layer_kind=st.sampled_from(["", "full", "sliding"]),
    row=st.integers(-3, 300),
    column=st.integers(-3, 300),
    replay=st.booleans(),
)
findings = st.builds(
    Finding,
    check=TEXT,
    kind=TEXT,
    site=TEXT,
    headline=TEXT,
    location=locations,
    expected=TEXT,
    got=TEXT,
    history=st.lists(TEXT, max_size=3).map(tuple),
)
pools = st.builds(
    Pool,
    name=TEXT,
    pages=st.integers(0, 2**70),
    page_size=st.integers(1, 2**70),
    tokens=st.integers(),
    used_tokens=st.integers(),
)
steps = st.builds(
    Step,
    step=st.integers(),
    forward_mode=TEXT,
    rids=st.lists(TEXT, max_size=3).map(tuple),
    seq_lens=st.lists(st.integers(), max_size=3).map(tuple),
)

tracers = st.builds(
    TracerStatus,
    name=TEXT,
    mode=TEXT,
    limits=st.lists(st.builds(Limit, TEXT, TEXT, st.integers()), max_size=2).map(tuple),
    off=TEXT,
    off_step=st.integers(),
    audited=st.integers(),
    dead=st.lists(TEXT, max_size=2).map(tuple),
    checked=st.lists(st.builds(Checked, TEXT, st.integers(), st.integers()), max_size=2).map(tuple),
    findings=st.dictionaries(TEXT, st.integers(), max_size=2),
)


asserts = st.builds(DeviceAssert, TEXT, TEXT, st.integers(), TEXT, TEXT, TEXT, count=st.integers())
lookups = st.builds(
    Lookup,
    *(TEXT, TEXT, TEXT),
    sorts=st.lists(TEXT, max_size=2).map(tuple),
    rows=st.integers(),
    low=st.integers(),
    high=st.integers(),
    exact=st.booleans(),
    verdict=TEXT | st.sampled_from(["could", "cannot", "not known"]),
    why=TEXT,
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Of the right types and shapes; the numbers are anything that an int64 can be."""
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(0, 9))
    cells = draw(st.lists(INT64, min_size=rows * columns, max_size=rows * columns))
    column = st.lists(INT64, min_size=rows, max_size=rows)
    bad = draw(st.lists(st.tuples(INT64 | st.integers(-1, 9), st.integers(-1, 9), INT64)))
    return Table(
        values=np.array(cells, dtype=np.int64).reshape(rows, columns),
        seq_lens=np.array(draw(column), dtype=np.int64),
        first_live=np.array(draw(column), dtype=np.int64),
        bad=np.array(bad, dtype=np.int64).reshape(len(bad), 3),
        pool=draw(pools),
        window=draw(st.integers()),
        row0=draw(st.integers()),
        column0=draw(st.integers()),
        rows_total=draw(st.integers()),
        columns_total=draw(st.integers()),
        rids=draw(st.lists(TEXT, min_size=rows, max_size=rows).map(tuple) | st.just(())),
    )


@st.composite
def tapes(draw: st.DrawFn) -> Tape:
    """Of the right types and shapes; what is on it is anything."""
    numbers = draw(st.lists(INT64, max_size=6))
    size = draw(st.integers(max(0, 8 * len(numbers) - 7), 8 * len(numbers)))
    return Tape(
        format=draw(st.integers()),
        page=draw(st.integers()),
        firsts=draw(st.booleans()),
        begins=draw(TEXT),
        first=draw(st.integers()),
        steps=draw(st.integers()),
        requests=draw(st.integers()),
        size=size,
        events=np.array(numbers, dtype=np.int64),
        chunks=draw(st.lists(st.integers(0, size - 1), max_size=3).map(tuple)) if size else (),
        scheduler=draw(st.dictionaries(TEXT, plain, max_size=3)),
        limits=draw(st.lists(TEXT, max_size=2).map(tuple)),
    )


memories = st.builds(
    MemoryMap,
    ranges=st.lists(
        st.builds(
            MemoryRange,
            start=st.integers(),
            nbytes=st.integers(),
            what=TEXT,
            name=TEXT,
            layer=st.integers(),
            page_bytes=st.integers(),
            page_size=st.integers(),
        ),
        max_size=3,
    ).map(tuple),
    step=st.integers(),
    segments=st.booleans(),
    bare=st.lists(st.integers(), max_size=5).map(tuple),
)
autopsies = st.builds(
    Autopsy,
    core=TEXT,
    verdict=TEXT,
    kernel=TEXT,
    grid=st.lists(st.integers(), max_size=4).map(tuple),
    block=st.lists(st.integers(), max_size=4).map(tuple),
    address=st.integers(),
    history=st.lists(TEXT, max_size=3).map(tuple),
    notes=st.lists(TEXT, max_size=3).map(tuple),
)
requests = st.builds(
    RequestEvent,
    step=st.integers(),
    time_ns=st.integers(),
    request=TEXT,
    kind=TEXT,
    begin=st.integers(),
    number=st.integers(),
    note=TEXT,
)
records = st.builds(
    TrapRecord,
    finding=findings,
    created=TEXT,
    versions=st.dictionaries(TEXT, TEXT, max_size=3),
    geometry=st.dictionaries(TEXT, plain, max_size=3),
    fixes=st.dictionaries(TEXT, TEXT, max_size=3),
    tracers=st.lists(tracers, max_size=2).map(tuple),
    faults=st.lists(TEXT, max_size=3).map(tuple),
    plugins=st.dictionaries(TEXT, TEXT, max_size=3),
    others=st.lists(st.builds(OtherHook, TEXT, TEXT, TEXT, TEXT), max_size=2).map(tuple),
    pools=st.lists(pools, max_size=3).map(tuple),
    table=st.none() | tables(),
    steps=st.lists(steps, max_size=3).map(tuple),
    requests=st.lists(requests, max_size=3).map(tuple),
    requests_lost=st.integers(),
    asserts=st.lists(asserts, max_size=2).map(tuple),
    lookups=st.lists(lookups, max_size=2).map(tuple),
    tape=st.none() | tapes(),
    memory=st.none() | memories,
    autopsy=st.none() | autopsies,
)


def same(a: Any, b: Any) -> bool:
    """Equality that looks into dataclasses, lists and mappings, and compares arrays by value."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
        )
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
