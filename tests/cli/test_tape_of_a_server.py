"""``g4debug doctor --pid PID --tape FILE`` writes FILE only if it is what was asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from sample_trap import sample_record

from g4debug.cli import CliError, _tape
from g4debug.dumps import writing

pytestmark = pytest.mark.once("no server is asked")


def test_a_dump_without_a_tape_does_not_replace_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, target = tmp_path / "dump.pt", tmp_path / "tape.pt"
    dump.write_bytes(writing.encode(sample_record()))
    target.write_text("of yesterday")
    scheduler = SimpleNamespace(pid=7, rank="tp 0")
    monkeypatch.setattr(_tape, "look", lambda pid: SimpleNamespace(schedulers=[scheduler]))
    monkeypatch.setattr(_tape, "dump_of", lambda pid: dump)
    with pytest.raises(CliError, match=r"scheduler 7 has no tape .* was not written"):
        _tape.fetch(7, target)
    assert target.read_text() == "of yesterday"
    assert not dump.exists()
