"""``g4debug show FOLDER``, ``show A B C`` and ``report`` of them: the dumps of several ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from sample_kinds import crash
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing
from g4debug.findings.record import TrapRecord
from g4debug.reporters.html import render as render_html

EVIL = "\x1b]0;owned\x07\u202e"


def member(
    record: TrapRecord, time: str, rank: int, *, launch: str = "L", step: int = 118, **changes
) -> TrapRecord:
    at = dataclasses.replace(
        record.finding.location,
        host=changes.pop("host", "node7"),
        pid=4700 + rank,
        dp_rank=0,
        rank=rank,
        pp_rank=0,
        step=step,
    )
    finding = dataclasses.replace(record.finding, location=at)
    created = f"2026-06-01T03:14:{time}+00:00"
    return dataclasses.replace(record, finding=finding, created=created, launch=launch, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three ranks on two hosts; the one that found it first has the name that sorts last."""
    ours = sample_record()
    swapped = {**ours.fixes, "swa-state-swap": "applied: this SGLang needs it"}
    last = dataclasses.replace(ours.steps[-1], seq_lens=(9,), rids=("other",))
    dumps = {
        "z.pt": member(ours, "15.000", 1),
        "a.pt": member(crash(), "15.400", 0, step=117, fixes=swapped),
        "b.pt": member(
            crash(), "16.500", 2, host="node8", steps=(*ours.steps[:-1], last),
            arguments={"page_size": 32}, versions={**ours.versions, "torch": "2.12.0"},
        ),
        "old.pt": member(ours, "01.000", 0, launch="older"),
    }  # fmt: skip
    for name, record in dumps.items():
        writing.write(writing.encode(record), tmp_path, name)
    (tmp_path / "broken.pt").write_text("no")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert cli.main([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_the_first_finding_in_full_and_the_others_in_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(capsys, "show", folder, "--width", "120")
    assert out.startswith(sample_record().finding.headline)
    assert "INCIDENT  3 dumps of 3 processes on 2 hosts, within 1.5 s\n" in out
    assert "first: node7 tp1, pid 4701" in out
    assert "as true as the clocks" in out
    assert "1 other incident here: g4debug list" in out
    others = out.partition("OTHERS")[2].partition("DIFFERS")[0]
    assert "+0.4 s node7 tp0 · step 117" in others
    assert "+1.5 s node8 tp2" in others
    assert "CUDA error" in others
    assert "a.pt" in others
    # A tired reader looks at the last lines.
    assert out.index("DIFFERS") < out.index("\nCAUSE") < out.index("\nNEXT")
    assert "PAGE TABLE" in out


def test_what_differs_between_the_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(run(capsys, "show", folder, "--json"))
    differs = {d["name"]: {v["value"]: v["members"] for v in d["values"]} for d in data["differs"]}
    tp0, tp1, tp2 = "node7 tp0", "node7 tp1", "node8 tp2"
    assert differs["step"] == {"118": [tp1, tp2], "117": [tp0]}
    assert differs["finding"] == {
        "page-table: out-of-range": [tp1],
        "flight-recorder: cuda-error": [tp0, tp2],
    }
    assert differs["version of torch"] == {"2.11.0+cu130": [tp1, tp0], "2.12.0": [tp2]}
    assert differs["argument page_size"] == {"not known": [tp1, tp0], "32": [tp2]}
    assert differs["fix swa-state-swap"] == {
        "off: G4DEBUG_FIX_SWA_STATE_SWAP=0": [tp1, tp2],
        "applied: this SGLang needs it": [tp0],
    }
    # The batch that all ranks must have had in common comes first.
    assert data["differs"][0]["name"] == "batch of step 118"
    assert not any(name.startswith("version of sglang") for name in differs)
    assert data["first"]["finding"]["headline"] == sample_record().finding.headline
    assert [m["path"].rpartition("/")[2] for m in data["members"]] == ["z.pt", "a.pt", "b.pt"]
    assert data["incident"] == {"dumps": 3, "elsewhere": 1}


def test_dumps_that_are_named_are_one_incident(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(capsys, "show", folder / "b.pt", folder / "a.pt", "--width", "120")
    assert out.startswith(crash().finding.headline)
    assert "INCIDENT  2 dumps of 2 processes on 2 hosts" in out
    assert "other incident" not in out
    out = run(capsys, "show", folder / "a.pt", folder / "broken.pt", "--width", "120")
    others = out.partition("OTHERS")[2]
    assert "cannot be read: not a g4debug dump" in others
    assert "pid -1" not in others


def test_one_dump_is_shown_as_before(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "INCIDENT" not in run(capsys, "show", folder / "a.pt")
    same = member(sample_record(), "15.000", 1)
    only = folder / "only"
    for name, record in (("x.pt", same), ("y.pt", dataclasses.replace(same))):
        writing.write(writing.encode(record), only, name)
    out = run(capsys, "show", only, "--width", "120")
    assert "nothing but when, where and by which process" in out
    assert "dp0/tp1/pp0 (2)" in out


def test_folders_of_two_hosts_are_looked_at_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "node9"
    dump = member(crash(), "15.900", 3, host="node9")
    writing.write(writing.encode(dump), other, "c.pt")
    data = json.loads(run(capsys, "show", folder, other, "--json"))
    assert [m["host"] for m in data["members"]] == ["node7", "node7", "node9", "node8"]


@pytest.mark.parametrize("what", ["empty", "broken", "mixed", "missing"])
def test_what_cannot_be_shown(folder: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    (folder / "none").mkdir()
    calls = {
        "empty": (folder / "none",),
        "broken": (folder / "broken.pt", folder / "broken.pt"),
        "mixed": (folder / "a.pt", folder),
        "missing": (folder / "a.pt", folder / "mistyped.pt"),
    }
    said = run(capsys, "show", *calls[what], code=2)
    assert said.startswith("g4debug: ")
    assert said.count("\n") == 1


def test_a_page_of_the_incident(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "report", folder)
    assert out == f"{folder / 'z.html'}\n"
    page = (folder / "z.html").read_text()
    for word in ("INCIDENT", "OTHERS", "DIFFERS", "node8 tp2", "batch of step 118"):
        assert word in page
    assert page.index("INCIDENT") < page.index("<dt>CAUSE") < page.index("<dt>DIFFERS")
    alone = render_html(sample_record())
    assert "INCIDENT" not in alone


def test_a_strangers_text_steers_no_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = member(crash(), "15.600", 3, host=EVIL, versions={EVIL: EVIL}, arguments={EVIL: EVIL})
    finding = dataclasses.replace(record.finding, headline=f"g4debug: {EVIL}")
    record = dataclasses.replace(record, finding=finding)
    writing.write(writing.encode(record), folder, "e.pt")
    for arguments in ((), ("--all",), ("--json",)):
        out = run(capsys, "show", folder, *arguments)
        assert not {"\x1b", "\x07", "\u202e"} & set(out)
    run(capsys, "report", folder)
    assert not {"\x1b", "\u202e"} & set((folder / "z.html").read_text())


def test_of_many_dumps_only_some_are_read_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from g4debug.cli import _incident

    for rank in range(_incident.READ + 8):
        record = member(sample_record(), f"15.{rank:03}", rank)
        writing.write(writing.encode(record), tmp_path, f"{rank}.pt")
    data = json.loads(run(capsys, "show", tmp_path, "--json"))
    assert len(data["members"]) == _incident.READ + 8
    assert sum(m["read"] for m in data["members"]) == _incident.READ
    out = run(capsys, "show", tmp_path)
    assert "were not read" in out
