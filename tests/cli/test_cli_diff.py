"""``g4debug diff``: what it calls a difference, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_kinds import KINDS, leak, wrong_typestate
from sample_trap import RIDS, sample_record

from g4debug import cli
from g4debug.dumps import writing
from g4debug.findings.record import TrapRecord
from g4debug.reporters.compare import Part, compare


def parts(a: TrapRecord, b: TrapRecord) -> dict[str, Part]:
    return {p.name: p for p in compare(a, b)}


def changes(a: TrapRecord, b: TrapRecord, name: str) -> list[tuple[str, str | None, str | None]]:
    return [(c.name, c.a, c.b) for c in parts(a, b)[name].changes]


def other(**values: Any) -> TrapRecord:
    return dataclasses.replace(sample_record(), **values)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    later = other(versions={**sample_record().versions, "sglang": "0.5.13.post1"})
    records = {"a.pt": sample_record(), "b.pt": later}
    return [str(writing.write(writing.encode(r), tmp_path, name)) for name, r in records.items()]


def test_exit_codes(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", paths[0], paths[0]]) == 0
    assert "no difference" in capsys.readouterr().out
    assert cli.main(["diff", *paths]) == 1
    out = capsys.readouterr().out
    assert "sglang  0.5.12.post1 → 0.5.13.post1" in out
    assert "they differ in: versions\n" in out
    assert out.index("VERSIONS") < out.index("SAME")
    assert cli.main(["diff", paths[0], paths[0] + "x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_json(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", *paths, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["same"] is False
    assert [data["a"], data["b"]] == paths
    found = [p for p in data["parts"] if p["changes"]]
    assert [p["name"] for p in found] == ["versions"]
    assert found[0]["changes"] == [{"name": "sglang", "a": "0.5.12.post1", "b": "0.5.13.post1"}]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_itself_and_no_other(kind: str) -> None:
    a = KINDS[kind]()
    assert not any(p.changes for p in compare(a, KINDS[kind]()))
    for name, make in KINDS.items():
        assert name == kind or any(p.changes for p in compare(a, make()))


def test_time_and_process_are_no_difference() -> None:
    record = sample_record()
    location = dataclasses.replace(record.finding.location, pid=1)
    finding = dataclasses.replace(record.finding, location=location)
    again = dataclasses.replace(record, created="2027-01-01T00:00:00+00:00", finding=finding)
    assert not any(p.changes for p in compare(record, again))


def test_steps_are_aligned_by_their_number() -> None:
    a = sample_record()
    steps = list(a.steps)
    steps[8] = dataclasses.replace(steps[8], full_used=7, seq_lens=(9, *steps[8].seq_lens[1:]))
    b = other(steps=(*steps[2:], dataclasses.replace(steps[-1], step=119, forward_mode="EXTEND")))
    found = parts(a, b)["steps"]
    assert found.note == "first difference at step 115"
    assert found.same == 9
    assert [(c.name, c.a is None, c.b is None) for c in found.changes] == [
        ("step 115", False, False),
        ("steps 107..108", False, True),
        ("step 119", True, False),
    ]
    assert found.changes[0].b == f"full used 7, tokens of {RIDS[0]} 9"
    assert found.changes[2].b == "EXTEND, batch 7, seq_lens 64..870"
    assert parts(a, other(steps=a.steps[3:]))["steps"].note.startswith("equal in all 9 steps")
    last = (dataclasses.replace(a.steps[-1], step=999),)
    assert parts(a, other(steps=last))["steps"].note == "no step in common"


def test_cells_are_compared_by_request_and_only_where_a_kernel_reads() -> None:
    a = sample_record()
    assert a.table is not None
    order = [1, 0, *range(2, 8)]
    values = a.table.values[order].copy()
    values[3, 8], values[6, 3] = 31, 99  # the bad cell, and garbage past a row's length
    lengths = a.table.seq_lens[order].copy()
    lengths[5] += 64
    table = dataclasses.replace(
        a.table,
        values=values,
        seq_lens=lengths,
        first_live=a.table.first_live[order],
        bad=np.zeros((0, 3), dtype=np.int64),
        rids=tuple(a.table.rids[i] for i in order),
    )
    assert changes(a, other(table=table), "page table") == [
        (f"request {RIDS[0]} row", "0", "1"),
        (f"request {RIDS[1]} row", "1", "0"),
        (f"request {RIDS[3]} column 8", "57", "31"),
        (f"request {RIDS[5]} tokens", "870", "934"),
        (f"request {RIDS[5]} column 14", None, "0"),
    ]
    assert changes(a, other(table=None), "page table") == [("table", "8x16", None)]


def test_two_servers_share_no_request_id() -> None:
    """Else every row and every step would differ in its ids alone."""
    a = sample_record()
    assert a.table is not None
    names = {rid: f"other-{i}" for i, rid in enumerate(RIDS) if rid}
    steps = tuple(dataclasses.replace(s, rids=tuple(names[r] for r in s.rids)) for s in a.steps)
    rids = tuple(names.get(r, "") for r in a.table.rids)
    at = dataclasses.replace(a.finding.location, request=names[RIDS[3]])
    b = other(
        steps=steps,
        table=dataclasses.replace(a.table, rids=rids),
        finding=dataclasses.replace(a.finding, location=at),
    )
    assert not any(p.changes for p in compare(a, b))


def test_histories_say_what_is_only_in_one() -> None:
    a = wrong_typestate()
    b = dataclasses.replace(a, transitions=a.transitions[:-1])
    ((name, left, right),) = changes(a, b, "spec info")
    assert (name, right) == ("only in A", None)
    assert left is not None
    assert left.startswith("step 118: merge: verify-input -> verify-input, batch 2")
    assert left.endswith("WRONG")
    b = dataclasses.replace(leak(), holdings=leak().holdings[1:])
    assert [c[0] for c in changes(leak(), b, "holders")] == ["only in A"]


def test_a_long_history_shows_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = dataclasses.replace(wrong_typestate(), transitions=())
    files = [
        str(writing.write(writing.encode(r), tmp_path, f"{i}.pt"))
        for i, r in enumerate((a, wrong_typestate()))
    ]
    assert cli.main(["diff", *files, "--width", "80"]) == 1
    out = capsys.readouterr().out
    assert "3 earlier (--all)" in out
    assert "WRONG" in out
    assert "step 115: draft:" not in out
    assert all(len(line) <= 80 for line in out.splitlines()[4:])
    cli.main(["diff", *files, "--all"])
    assert "step 115: draft:" in capsys.readouterr().out
