"""``g4debug report``: where the page goes, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return writing.write(writing.encode(sample_record()), tmp_path, "x.pt")


def test_next_to_the_dump(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(path)]) == 0
    out = path.with_suffix(".html")
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert sorted(p.name for p in path.parent.iterdir()) == ["x.html", "x.pt"]


def test_to_a_file_and_to_stdout(
    path: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert cli.main(["report", str(path), "-o", str(tmp_path / "a.html")]) == 0
    capfdbinary.readouterr()
    assert cli.main(["report", str(path), "-o", "-"]) == 0
    assert capfdbinary.readouterr().out == (tmp_path / "a.html").read_bytes()


@pytest.mark.parametrize("out", ["x.pt", ".", "none/a.html", "link.html", "/dev/null"])
def test_what_it_does_not_overwrite(
    path: Path, tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = path.read_bytes()
    (tmp_path / "link.html").symlink_to(path)
    assert cli.main(["report", str(path), "-o", str(tmp_path / out)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("g4debug: ")
    assert captured.err.count("\n") == 1
    assert path.read_bytes() == before


def test_a_file_that_is_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pt").write_text("no")
    assert cli.main(["report", str(tmp_path / "x.pt")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "x.html").exists()
