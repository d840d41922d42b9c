"""How many hooks of ours a scheduler calls in a step: the budget of ``watch`` and of ``=1``.

Time differs from machine to machine; calls do not. hook_calls.json has, for each mode of a batch,
the most and the usual number of calls in one round of the event loop that launches one (or only
processes the result of the last one, in which a request ends), for a toy with MTP on the CPU
engine that serves one request after the other. More is a failure. ``UPDATE_SNAPSHOTS=1 pytest
tests/tracers/test_hook_calls.py`` writes it anew: look at what grew, and why, in the diff.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import drive_hook_calls
import installed_plugin
import pytest
import releases
from real_engine import ENGINE, drive, side_by_side

pytestmark = [
    *ENGINE,
    pytest.mark.skipif(not releases.is_newest(), reason="the table is that of the newest release"),
]
TABLE = Path(__file__).with_name("hook_calls.json")
WARM = 2  # requests that are not counted: in the first ones more is made for the first time
SWITCHES = {"watch": "watch", "one": "1"}


def calls(folder: Path, switch: str) -> dict[str, dict[str, int]]:
    """Mode of a batch -> the most and the usual calls in a round that launches one."""
    counts, plugin = folder / "counts.json", folder / "plugin"
    plugin.mkdir(parents=True)
    installed_plugin.install(plugin, "hook-counter", "hook_counter:register")
    support = Path(drive_hook_calls.__file__)
    run = drive(
        folder,
        str(support),
        SGLANG_TRTLLM_MHA_DEBUG=switch,
        HOOK_COUNTS=str(counts),
        PYTHONPATH=installed_plugin.path(plugin, support.parent),
    )
    assert run.status == 0, run.log[-3000:]
    assert run.dumps == []
    rounds = json.loads(counts.read_text())
    prefills = [n for n, (mode, _) in enumerate(rounds) if mode == "EXTEND"]
    assert len(prefills) == drive_hook_calls.REQUESTS, [mode for mode, _ in rounds]
    found: dict[str, list[int]] = {}
    for mode, sites in rounds[prefills[WARM] :]:
        found.setdefault(mode, []).append(sum(sites.values()))
    return {
        mode: {"most": max(each), "usual": int(statistics.median_low(each))}
        for mode, each in sorted(found.items())
    }


def test_no_step_calls_more_hooks_than_it_may(tmp_path):
    found = side_by_side(
        **{
            name: lambda name=name, switch=switch: calls(tmp_path / name, switch)
            for name, switch in SWITCHES.items()
        }
    )
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        TABLE.write_text(json.dumps(found, indent=2) + "\n")
    budget = json.loads(TABLE.read_text())
    assert {name: set(modes) for name, modes in found.items()} == {
        name: set(modes) for name, modes in budget.items()
    }
    over = {
        (name, mode, which): (count, budget[name][mode][which])
        for name, modes in found.items()
        for mode, each in modes.items()
        for which, count in each.items()
        if count > budget[name][mode][which]
    }
    assert not over, f"(found, allowed): {over}"
