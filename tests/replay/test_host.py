"""Environments with other releases of SGLang are made in the clone, and what cannot be is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from g4debug import cli
from g4debug.replay import child, host
from g4debug.replay.setting import CannotReplay

pytestmark = pytest.mark.once("it needs no SGLang")
MAKEFILE = """env:
\t@echo made
\t@mkdir -p .venv-$(SGLANG)/bin .venv-$(SGLANG)/lib/python3/site-packages/sglang-$(SGLANG).dist-info
\t@touch .venv-$(SGLANG)/bin/python
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "ROOT", tmp_path)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "requirements").mkdir()
    for name in ("sglang-0.4.1.txt", "sglang-0.4.2.txt", "torch.txt"):
        (tmp_path / "requirements" / name).touch()
    return tmp_path


def test_an_environment_is_made_once(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotReplay, match=r"run: make env SGLANG=0\.4\.2 in the clone"):
        host.python("0.4.2")
    for _ in range(2):
        host.made("0.4.2")
    assert host.python("0.4.2") == str(clone / ".venv-0.4.2" / "bin" / "python")
    out, err = capfd.readouterr()
    assert (out, err.count("made")) == ("", 1)  # stdout has the result, maybe as JSON


def test_a_release_that_nobody_can_make_is_refused_before_the_replay(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", "no-such-dump.pt", "--sglang", "0.4.3"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "an environment can be made of 0.4.1, 0.4.2 only" in said
    (clone / "Makefile").unlink()
    with pytest.raises(CannotReplay, match="in a clone of g4debug only"):
        host.made("0.4.2")


def test_a_make_that_fails_is_no_environment(clone: Path) -> None:
    (clone / "Makefile").write_text("env:\n\t@false\n")
    with pytest.raises(CannotReplay, match=r"make .* failed"):
        host.made("0.4.1")


def test_the_arguments_of_a_server_are_known_however_they_are_declared() -> None:
    class Struct:
        __struct_fields__ = ("a", "b")

    assert child._fields(Struct) == {"a", "b"}
    assert "dump" in child._fields(child.Order)
