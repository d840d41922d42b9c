"""``g4debug fixes``: what a server would say, without starting one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from g4debug import discovery
from g4debug.cli import CliError, fixes, main
from g4debug.fixes import swa_state_swap
from g4debug.hooking import targets
from g4debug.settings import fix_switch

SWITCH = "G4DEBUG_FIX_SWA_STATE_SWAP"
needs_sglang = pytest.mark.skipif(targets.sglang_version() is None, reason="needs sglang")


def by_id(environ=None):
    return {row.id: row for row in fixes.rows(environ or {})}


@needs_sglang
def test_every_fix_is_there_with_its_state_and_switches():
    found = by_id()
    assert tuple(found) == discovery.names("fix")
    for name, row in found.items():
        assert row.state in ("applied", "not-needed", "off", "target-missing")
        assert row.why
        assert row.switches[0] == fix_switch(name)


@needs_sglang
def test_the_environment_and_the_faults_count():
    assert by_id({SWITCH: "0"})["swa-state-swap"].why == f"{SWITCH}=0"
    assert by_id({SWITCH: "1"})["swa-state-swap"].state == "applied"
    row = by_id({"G4DEBUG_FAULTS": "stale-swa-state=on"})["swa-state-swap"]
    assert (row.state, row.why) == ("applied", "fault stale-swa-state puts the bug back")


def test_the_switch_that_a_seed_documents_is_listed(monkeypatch):
    fix = dataclasses.replace(swa_state_swap.FIX, switch="SGLANG_SEED_SWITCH")
    monkeypatch.setattr(swa_state_swap, "FIX", fix)
    found = by_id({"SGLANG_SEED_SWITCH": "off"})
    assert found["swa-state-swap"].switches == [SWITCH, "SGLANG_SEED_SWITCH"]
    if targets.sglang_version() is not None:
        assert found["swa-state-swap"].why == "SGLANG_SEED_SWITCH=0"


def test_without_sglang_the_states_are_unknown(monkeypatch, capsys):
    monkeypatch.setattr(targets, "sglang_version", lambda: None)
    monkeypatch.delenv("G4DEBUG_FIXES", raising=False)
    assert main(["fixes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(r["state"], r["why"]) for r in rows} == {("unknown", "this Python has no SGLang")}
    assert main(["fixes"]) == 0
    assert capsys.readouterr().out.startswith(
        "this Python has no SGLang, so the states are unknown\nG4DEBUG_FIXES=needed (the default): "
    )


@needs_sglang
@pytest.mark.parametrize("mode", ["none", "needed", "all"])
def test_the_mode_is_shown_and_counts(monkeypatch, capsys, mode):
    for name in [n for n in os.environ if n.startswith(("G4DEBUG_", "SGLANG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("G4DEBUG_FIXES", mode)
    assert main(["fixes", "--width", "100"]) == 0
    assert f"\nG4DEBUG_FIXES={mode}: " in capsys.readouterr().out
    applied = {row.purpose for row in by_id({"G4DEBUG_FIXES": mode}).values()
               if row.state == "applied"}  # fmt: skip
    all_fixes = [discovery.load("fix", name) for name in discovery.names("fix")]
    needed = {f.purpose for f in all_fixes if targets.matches(f.needs) and f.still_broken()}
    wanted = {"none": set(), "needed": {"correctness"}, "all": {"correctness", "performance"}}[mode]
    assert applied == wanted & needed  # not every release needs something for performance
    assert "correctness" in needed


@pytest.mark.parametrize("environ", [{SWITCH: "maybe"}, {"G4DEBUG_FIX_SWA": "1"}])
def test_an_environment_that_stops_a_server_is_an_error(environ):
    with pytest.raises(CliError, match=f"server would not start.*{next(iter(environ))}"):
        fixes.rows(environ)


@needs_sglang
@pytest.mark.parametrize(
    ("faults", "said"),
    [("page-oop=1*on", "did you mean 'page-oob'"), ("page-oob=1*onn", "no task 'onn'")],
)
def test_faults_that_stop_a_server_are_an_error(faults, said):
    with pytest.raises(CliError, match=f"would not start.*G4DEBUG_FAULTS: .*{said}"):
        fixes.rows({"G4DEBUG_FAULTS": faults})


@needs_sglang
def test_a_fix_that_cannot_be_forced_here_is_an_error(monkeypatch):
    monkeypatch.setattr(
        swa_state_swap, "FIX", dataclasses.replace(swa_state_swap.FIX, needs=">=99")
    )
    with pytest.raises(CliError, match=f"would not start.*{SWITCH}=1: .*written for"):
        fixes.rows({SWITCH: "1"})


@needs_sglang
def test_sglang_is_read_not_loaded():
    code = (
        "import sys; from g4debug.cli import main; main(['fixes', '--json'])\n"
        "print([m for m in ('torch', 'sglang', 'triton') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)


@needs_sglang
@pytest.mark.engine
def test_a_real_process_says_the_same():
    """The fixes of the start-up line, from SGLang's own plugin loader."""
    from g4debug import cpu

    code = "from sglang.srt.plugins import load_plugins; load_plugins()"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    environment = cpu.environment({**clean, "SGLANG_TRTLLM_MHA_DEBUG": "1"})
    done = subprocess.run(
        [sys.executable, "-m", "g4debug.cpu", "-c", code],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    line = next(x for x in done.stderr.splitlines() if "fixes: " in x)
    said = line.split("fixes: ")[1].split("(")[1].split(")")[0].split(", ")
    assert said == [name for name, row in by_id().items() if row.state == "applied"]
