"""to_plain and from_plain are inverses, and errors are named."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_strategies import records, same
from sample_trap import sample_record

from g4debug.dumps.plain import from_plain, to_plain
from g4debug.findings.record import TrapRecord


@given(records)
def test_round_trip(record: TrapRecord) -> None:
    assert same(from_plain(to_plain(record)), record)


@settings(deadline=None)
@given(records, st.integers(40, 130))
def test_whatever_a_record_holds_it_renders_within_its_width(
    record: TrapRecord, width: int
) -> None:
    import io

    from g4debug.cli import make_console
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
        (("tracers",), [{"mode": "raise"}], "tracers.name: missing"),
        (
            ("tracers",),
            [{"name": "x", "limits": [{"what": 1}]}],
            "tracers.limits.what: expected str",
        ),
        (("tracers",), {"page-table": 3}, "tracers: expected dict"),
        (("surplus",), 1, "unknown field 'surplus'"),
        (("table", "seq_lens"), np.zeros(3, dtype=np.int64), "one entry per row"),
        (("table", "bad"), np.zeros((3, 2), dtype=np.int64), "three columns"),
        (("table", "values"), np.zeros((8, 16)), "expected int64 with 2 dimensions, got float64"),
        (("table", "bad"), torch.zeros(1, 3, dtype=torch.int64), "expected IntArray, got Tensor"),
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


def test_the_tracers_of_an_older_dump_had_only_a_mode() -> None:
    data = to_plain(sample_record())
    data["tracers"] = {"page-table": "armed: contain"}
    data["schema"] = 2
    (tracer,) = from_plain(data).tracers
    assert (tracer.name, tracer.mode, tracer.state) == ("page-table", "contain", "armed: contain")
