"""``g4debug doctor --pid PID --tape FILE`` writes FILE only if it is what was asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sample_trap import sample_record

from g4debug.cli import CliError, _tape
from g4debug.dumps import reading, writing
from g4debug.findings.record import Tape

pytestmark = pytest.mark.once("no server is asked")


def test_a_dump_without_a_tape_does_not_replace_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, target = tmp_path / "dump.pt", tmp_path / "tape.pt"
    dump.write_bytes(writing.encode(sample_record()))
    target.write_text("of yesterday")
    answer(monkeypatch, dump)
    with pytest.raises(CliError, match=r"scheduler 7 has no tape .* was not written"):
        _tape.fetch(7, target)
    assert target.read_text() == "of yesterday"
    assert not dump.exists()


def test_only_the_owner_may_read_the_tape_as_any_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, target = tmp_path / "dump.pt", tmp_path / "tape.pt"
    tape = Tape(1, 16, False, "start", 0, 9, 1, 8, np.zeros(1, dtype=np.int64), (0,), {})
    dump.write_bytes(writing.encode(dataclasses.replace(sample_record(), tape=tape)))
    target.write_text("of yesterday")
    target.chmod(0o644)
    answer(monkeypatch, dump)
    assert "9 steps and 1 requests of scheduler 7" in _tape.fetch(7, target)
    assert target.stat().st_mode & 0o777 == 0o600
    assert reading.read(target).tape is not None
    assert not dump.exists()


@pytest.mark.parametrize(
    ("steps", "limits", "ended", "says"),
    [
        (9, ("grammars", "sessions"), (), "It cannot be replayed: a tape cannot carry this (gramm"),
        (0, (), ("grammars",), "nothing to replay yet: it has just begun after what no tape carr"),
        (0, (), (), "nothing to replay yet: it has just begun.\n"),
        (9, (), (), ""),
    ],
)
def test_it_says_at_once_that_nobody_can_replay_it(
    steps: int,
    limits: tuple[str, ...],
    ended: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dump = tmp_path / "dump.pt"
    tape = Tape(
        3, 16, False, "start", 0, steps, 1, 8, np.zeros(1, dtype=np.int64), (0,), {},
        limits, (0,) * len(limits), {}, ended,
    )  # fmt: skip
    dump.write_bytes(writing.encode(dataclasses.replace(sample_record(), tape=tape)))
    answer(monkeypatch, dump)
    said = _tape.fetch(7, tmp_path / "tape.pt")
    assert says in said
    assert said.count("\n") == 1 + bool(says)


def test_what_is_no_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = tmp_path / "dump.pt"
    tape = Tape(1, 16, False, "start", 0, 9, 1, 8, np.zeros(1, dtype=np.int64), (0,), {})
    dump.write_bytes(writing.encode(dataclasses.replace(sample_record(), tape=tape)))
    answer(monkeypatch, dump)
    with pytest.raises(CliError, match="not a regular file"):
        _tape.fetch(7, tmp_path)
    assert not dump.exists()


def answer(monkeypatch: pytest.MonkeyPatch, dump: Path) -> None:
    """A server with one scheduler, which wrote this dump."""
    scheduler = SimpleNamespace(pid=7, rank="tp 0")
    monkeypatch.setattr(_tape, "look", lambda pid: SimpleNamespace(schedulers=[scheduler]))
    monkeypatch.setattr(_tape, "dump_of", lambda pid: dump)
