"""The command line of ``g4debug replay``."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing

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


def test_a_file_that_is_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.pt").write_text("hello")
    assert cli.main(["replay", str(tmp_path / "b.pt")]) == 2
    assert "not a g4debug dump" in capsys.readouterr().err
