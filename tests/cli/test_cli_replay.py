"""The command line of ``g4debug replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing
from g4debug.findings.record import TrapRecord
from g4debug.replay import run
from g4debug.reporters.replay import Replayed

pytestmark = pytest.mark.once("what is refused is refused without SGLang")


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "a.pt"
    path.write_bytes(writing.encode(sample_record()))
    return path


def test_a_dump_without_a_tape(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(dump)]) == 2
    assert capsys.readouterr().out.startswith("cannot be replayed, because the dump has no tape")


@pytest.mark.parametrize("text", ["locked-prefix", "locked-prefix=2", "no-such-fix=1", "=1"])
def test_a_fix_that_is_not_there(text: str, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(dump), "--fix", text]) == 2
    assert f"--fix {text}: expected ID=0 or ID=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("page-tabel", "there is no tracer page-tabel"),
        ("page-table, x,y", "there is no tracer x, y"),
        ("", "it names no tracer"),
        (",", "it names no tracer"),
    ],
)
def test_a_tracer_that_is_not_there_is_refused_before_sglang_starts(
    text: str,
    why: str,
    dump: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "replayed", lambda *_: pytest.fail("it was replayed"))
    assert cli.main(["replay", str(dump), "--trace", text]) == 2
    told = capsys.readouterr().err
    assert f"--trace {text}: {why}; expected some of " in told
    assert "kv-allocator" in told


def test_the_tracers_that_are_asked_for(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once; spaces do not matter. Without the option they are those that were armed."""
    armed: list[tuple[str, ...]] = []

    def replayed(_dump: Path, _record: TrapRecord, trace: tuple[str, ...], *_: Any) -> Replayed:
        armed.append(trace)
        return Replayed(0, "reproduced")

    monkeypatch.setattr(run, "replayed", replayed)
    for more in ((), ("--trace", "page-table, kv-allocator,page-table")):
        assert cli.main(["replay", str(dump), *more]) == 0
    assert armed == [(), ("page-table", "kv-allocator")]


@pytest.mark.parametrize(
    "more",
    [
        ("--shrink", "b.pt"),
        ("--script", "b.py"),
        ("--fix", "locked-prefix=1"),
        ("--sglang", "0.5.23"),
    ],
)
def test_a_part_is_not_enough_for_that(
    more: tuple[str, ...], dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(dump), "--until", "9", *more]) == 2
    assert "--until leaves out" in capsys.readouterr().err


def test_a_page_is_written_of_any_result(dump: Path, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    assert cli.main(["replay", str(dump), "--html", str(page)]) == 2
    assert "<h1>cannot be replayed, because the dump has no tape" in page.read_text()


@pytest.mark.parametrize("option", ["--html", "--shrink", "--script"])
def test_what_it_writes_never_replaces_the_dump_and_is_refused_before_it_begins(
    option: str, dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dump.read_bytes()
    assert cli.main(["replay", str(dump), option, str(dump)]) == 2
    assert "it is the dump itself" in capsys.readouterr().err
    assert dump.read_bytes() == before
    assert cli.main(["replay", str(dump), option, str(tmp_path / "no" / "a")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_two_results_do_not_go_into_one_file(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert cli.main(["replay", str(dump), "--shrink", out, "--script", out]) == 2
    assert "expected a file for each of them" in capsys.readouterr().err


def test_a_file_that_is_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.pt").write_text("hello")
    assert cli.main(["replay", str(tmp_path / "b.pt")]) == 2
    assert "not a g4debug dump" in capsys.readouterr().err
