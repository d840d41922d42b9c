"""``g4debug faults``: every fault that is there, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from g4debug import cli, discovery
from g4debug.faults import grammar
from g4debug.reporters import faults


def test_every_fault_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["faults", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [f["id"] for f in data["faults"]] == list(discovery.names("fault"))
    for entry in data["faults"]:
        fault = discovery.load("fault", entry["id"])
        assert entry["title"] == fault.title
        assert entry["caught_by"] == list(fault.caught_by)
        assert entry["selectors"] == list(fault.selectors)
        assert len(entry["tasks"]) == len(fault.tasks)
        assert not entry["broken"]
    assert cli.main(["faults", "--width", "80"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{f['id']}\n" in f"\n{out}" for f in data["faults"])
    assert all(len(line) <= 80 for line in out.splitlines()[:-1])


def test_the_example_is_good_grammar() -> None:
    text = faults.EXAMPLE.partition('"')[2].partition('"')[0]
    assert grammar.parse(text).seed == 7


def test_it_needs_no_sglang() -> None:
    code = (
        "import sys; sys.modules.update(sglang=None)\n"
        "from g4debug.cli import main; sys.exit(main(['faults']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "page-oob" in done.stdout
    assert "cannot be loaded" not in done.stdout


def test_a_broken_fault_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import g4debug.faults

    (tmp_path / "zz_broken.py").write_text("import not_there\n")
    (tmp_path / "zz_stress.py").write_text(
        "from g4debug.faults.base import Fault\n"
        "FAULT = Fault('zz-stress', 'a slow step', {'on': 'sleep'}, ())\n"
    )
    monkeypatch.setattr(g4debug.faults, "__path__", [*g4debug.faults.__path__, str(tmp_path)])
    discovery._modules.cache_clear()
    try:
        assert cli.main(["faults"]) == 0
    finally:
        discovery._modules.cache_clear()
        sys.modules.pop("g4debug.faults.zz_stress", None)
    out = capsys.readouterr().out
    assert "cannot be loaded here: ModuleNotFoundError: No module named 'not_there'" in out
    assert "caught by  none: stress (no tracer may report it)" in out
    assert "page-oob" in out
