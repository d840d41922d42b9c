"""``SGLANG_TRTLLM_MHA_DEBUG=watch`` on real engines: what it catches, and that nothing stops.

A healthy server is silent and has nothing of the page ledger. A page and a token outside of their
pool are told and dumped, and lost pages are when the server is idle; each server goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

import drive_tracers
import installed_plugin
import pytest
from drive_tracers import LENGTHS, OUTPUT
from real_engine import ENGINE, drive, side_by_side

HERE = Path(__file__).parent
pytestmark = ENGINE
DRIVER = str(Path(drive_tracers.__file__))
HEALTHY = str(HERE / "page_table" / "drive_healthy.py")
WATCH = {"SGLANG_TRTLLM_MHA_DEBUG": "watch"}
TRITON = {"attention_backend": "triton", "chunked_prefill_size": 128}
OOB = "seed=1;page-oob=1*on@mode=extend@runner=target->1*on@mode=target_verify"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch")
    probe, plugin = folder / "probe", folder / "plugin"
    for made in (probe, plugin):
        made.mkdir()
    installed_plugin.install(plugin, "watch-probe", "watch_probe:register")
    looked = {
        "PYTHONPATH": installed_plugin.path(plugin, Path(drive_tracers.__file__).parent),
        "WATCH_PROBE": str(probe),
    }
    found = side_by_side(
        # A warm process has all of g4debug imported, and what is loaded here is asked.
        healthy=lambda: drive(folder / "healthy", HEALTHY, cold=True, **WATCH, **looked),
        page=lambda: drive(folder / "page", DRIVER, **WATCH, G4DEBUG_FAULTS=OOB),
        token=lambda: drive(
            folder / "token",
            DRIVER,
            json.dumps(TRITON),
            **WATCH,
            G4DEBUG_FAULTS="seed=7;token-oob=1*on@mode=target_verify",
        ),
        leak=lambda: drive(
            folder / "leak",
            DRIVER,
            **WATCH,
            UNTIL_DUMPED="1",
            SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",
            G4DEBUG_FAULTS="seed=1;lost-free=1*on",
        ),
    )
    told = [json.loads(path.read_text()) for path in probe.glob("*.json")]
    return found, told


def test_a_healthy_server_is_silent(runs):
    run = runs[0]["healthy"]
    assert run.status == 0, run.log[-3000:]
    assert run.dumps == []
    assert "armed: flight-recorder, page-table, pool-leak (watch, contain)" in run.log
    assert "In part: page-table (ranges only). In part: pool-leak (counts at idle only)" in run.log
    assert "g4debug: page-table" not in run.log.replace("g4debug: page-table: prefill", "")
    assert "is off" not in run.log


def test_nothing_of_the_ledger_is_loaded(runs):
    told = [process for process in runs[1] if process["role"] == "scheduler"]
    assert told, "no scheduler was seen"
    assert all(process["ledger"] == [] for process in told), told
    assert all(process["sites"] for process in told)


def kinds(run):
    return {(record.finding.check, record.finding.kind) for record in run.dumps}


def test_a_page_outside_its_pool_is_told_and_the_server_goes_on(runs):
    run = runs[0]["page"]
    assert run.status == 0, run.log[-3000:]
    assert run.result == [OUTPUT] * 2 * len(LENGTHS)
    assert kinds(run) == {("page-table", "out-of-range")}
    modes = {record.finding.location.forward_mode for record in run.dumps}
    assert modes == {"EXTEND", "TARGET_VERIFY"} or "page-oob #2" not in run.log
    for record in run.dumps:
        assert "pages" in record.finding.headline  # how many pages the pool has
        assert record.tape is not None  # what g4debug replay needs


def test_a_token_outside_its_pool_is_told_and_the_server_goes_on(runs):
    run = runs[0]["token"]
    assert run.status == 0, run.log[-3000:]
    assert run.result == [OUTPUT] * 2 * len(LENGTHS)
    assert kinds(run) == {("page-table", "out-of-range")}


def test_lost_pages_are_told_when_the_server_is_idle(runs):
    run = runs[0]["leak"]
    assert run.status == 0, run.log[-3000:]
    assert run.result == [OUTPUT] * 2 * len(LENGTHS)
    assert kinds(run) == {("pool-leak", "leaked")}
    assert "tokens of the" in run.dumps[0].finding.headline
    assert run.dumps[0].finding.got.startswith("of ")
