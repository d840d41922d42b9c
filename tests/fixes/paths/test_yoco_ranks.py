"""yoco-fast-prefill on two real ranks of which one cannot make its cut: no answer, and no hang."""

from __future__ import annotations

from pathlib import Path

import installed_plugin
import one_rank_fails
import pytest
from real_engine import ENGINE, drive

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.once("what it tests is the same code on every release"),
    *ENGINE,
    pytest.mark.written_for("yoco-fast-prefill"),
]


@pytest.mark.long("an engine of two ranks")
def test_a_rank_that_cannot_cut_ends_the_server(tmp_path):
    """The other one has cut its rows, and adds up with it in every KV-shared layer."""
    plugin = tmp_path / "plugin"
    installed_plugin.install(plugin, "one-rank-fails", "one_rank_fails:register")
    support = Path(one_rank_fails.__file__).parent
    run = drive(
        tmp_path, str(HERE / "drive_yoco.py"), "tp",
        PYTHONPATH=installed_plugin.path(plugin, support), SGLANG_GEMMA4_YOCO="1",
    )  # fmt: skip
    assert run.status != 0
    assert not run.results
    errors = [x for x in run.log.splitlines() if "OutOfMemoryError: g4debug: " in x]
    assert errors, run.log[-3000:]
    assert "yoco-fast-prefill: rank 1 of 2 could not prepare a prefill" in errors[0]
    assert "G4DEBUG_FIX_YOCO_FAST_PREFILL=0" in errors[0]
