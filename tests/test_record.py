"""to_plain and from_plain are inverses, and what is wrong is named."""

from __future__ import annotations

import dataclasses
import enum
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "reporters"))
from sample_trap import sample_record

from g4debug.plain import from_plain, to_plain
from g4debug.record import (
    Finding,
    Location,
    Pool,
    Step,
    Table,
    TrapRecord,
)

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


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Of the right types and shapes; the numbers are anything that an int64 can be."""
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(0, 9))
    cells = draw(st.lists(INT64, min_size=rows * columns, max_size=rows * columns))
    column = st.lists(INT64, min_size=rows, max_size=rows)
    bad = draw(st.lists(st.tuples(INT64 | st.integers(-1, 9), st.integers(-1, 9), INT64)))
    return Table(
        values=torch.tensor(cells, dtype=torch.int64).reshape(rows, columns),
        seq_lens=torch.tensor(draw(column), dtype=torch.int64),
        first_live=torch.tensor(draw(column), dtype=torch.int64),
        bad=torch.tensor(bad, dtype=torch.int64).reshape(len(bad), 3),
        pool=draw(pools),
        window=draw(st.integers()),
        row0=draw(st.integers()),
        column0=draw(st.integers()),
        rows_total=draw(st.integers()),
        columns_total=draw(st.integers()),
        rids=draw(st.lists(TEXT, min_size=rows, max_size=rows).map(tuple) | st.just(())),
    )


records = st.builds(
    TrapRecord,
    finding=findings,
    created=TEXT,
    versions=st.dictionaries(TEXT, TEXT, max_size=3),
    geometry=st.dictionaries(TEXT, plain, max_size=3),
    fixes=st.dictionaries(TEXT, TEXT, max_size=3),
    faults=st.lists(TEXT, max_size=3).map(tuple),
    pools=st.lists(pools, max_size=3).map(tuple),
    table=st.none() | tables(),
    steps=st.lists(steps, max_size=3).map(tuple),
)


def same(a: Any, b: Any) -> bool:
    """Equality that looks into dataclasses and compares tensors by value."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
        )
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(records)
def test_round_trip(record: TrapRecord) -> None:
    assert same(from_plain(to_plain(record)), record)


@settings(deadline=None)
@given(records, st.integers(40, 130))
def test_whatever_a_record_holds_it_renders_within_its_width(
    record: TrapRecord, width: int
) -> None:
    import io

    from g4debug.cli._common import make_console
    from g4debug.reporters import json, terminal

    stream = io.StringIO()
    terminal.render(record, make_console(width=width, color=False, stream=stream))
    assert "\x1b" not in stream.getvalue()
    json.render(record, io.StringIO())


def test_subclasses_of_plain_values_are_stored_as_plain_values() -> None:
    class Mode(enum.IntEnum):
        DECODE = 2

    class Name(str, enum.Enum):  # noqa: UP042 - as SGLang's are
        SWA = "swa"

    record = dataclasses.replace(
        sample_record(),
        versions={"torch": torch.__version__},
        geometry={"mode": Mode.DECODE, "name": Name.SWA},
    )
    plain = to_plain(record)
    assert type(plain["versions"]["torch"]) is str
    assert plain["versions"]["torch"] == torch.__version__
    assert plain["geometry"] == {"mode": 2, "name": "swa"}
    assert [type(v) for v in plain["geometry"].values()] == [int, str]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("finding",), None, "finding: expected a mapping, got NoneType"),
        (("finding", "check"), 3, "finding.check: expected str, got int"),
        (("finding", "location", "row"), True, "finding.location.row: expected int, got bool"),
        (("finding", "history"), "text", "finding.history: expected a list, got str"),
        (("versions",), {"torch": 2}, "dump.versions: expected dict"),
        (("steps",), [{"step": 1}], "steps.forward_mode: missing"),
        (("surplus",), 1, "unknown field 'surplus'"),
        (("table", "seq_lens"), torch.zeros(3, dtype=torch.int64), "one entry per row"),
        (("table", "bad"), torch.zeros(3, 2, dtype=torch.int64), "three columns"),
        (("table", "values"), torch.zeros(8, 16), "expected int64 with 2 dimensions, got torch.f"),
        (("table", "bad"), torch.zeros(1, 3, dtype=torch.int64, device="meta"), "a CPU tensor"),
        (("table", "rids"), ["x"], "table.rids"),
        (("table", "pool", "page_size"), 0, "page_size must be positive"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[str, ...], value: Any, message: str) -> None:
    data = to_plain(sample_record())
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ValueError, match=message.split("'")[0]):
        from_plain(data)
