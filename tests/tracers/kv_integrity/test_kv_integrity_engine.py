"""kv-integrity on a real engine: silent where all is well, and each data fault found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_engine import ENGINE, WhenAsked, drive

pytestmark = ENGINE
DRIVER = Path(__file__).with_name("drive_kv_engine.py")
FAULTS = "seed=2;kv-nan=1*full;kv-bit-flip=1*swa(3)@step=8;kv-write-freed=1*full"
FIRED = re.compile(r"g4debug fault \(seed=2\) (kv-[a-z-]+) #1: (.*) \[step (\d+): ")


TRACE = {"G4DEBUG_TRACE": "kv-integrity"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines."""
    folder = tmp_path_factory.mktemp("engine")
    log = {**TRACE, "G4DEBUG_MODE": "log", "G4DEBUG_FAULTS": FAULTS}
    return WhenAsked(
        plain=lambda: drive(folder / "plain", str(DRIVER)),
        armed=lambda: drive(folder / "armed", str(DRIVER), **TRACE),
        faults=lambda: drive(folder / "faults", str(DRIVER), **log),
    )


def test_a_sound_server_gives_the_same_tokens_and_no_finding(runs):
    plain, armed = runs["plain"], runs["armed"]
    assert (plain.status, armed.status) == (0, 0), armed.log[-4000:]
    assert "armed: kv-integrity (raise)" in armed.log
    assert "checks nothing" not in armed.log
    assert not armed.dumps
    assert armed.result == plain.result


def test_every_data_fault_is_found(runs):
    run = runs["faults"]
    assert run.status == 0, run.log[-4000:]
    assert run.result
    log, findings = run.log, [record.finding for record in run.dumps]
    fired = {name: (what, int(step)) for name, what, step in FIRED.findall(log)}
    assert set(fired) == {"kv-nan", "kv-bit-flip", "kv-write-freed"}

    def found(kind, layer_kind):
        return next(f for f in findings if f.kind == kind and f.location.layer_kind == layer_kind)

    what, step = fired["kv-nan"]
    page, layer = re.search(r"full page (\d+)", what)[1], re.search(r"layer (\d+)", what)[1]
    nan = found("kv-changed", "full")
    assert f"FULL page {page}, " in nan.headline
    assert f"of layer {layer}, " in nan.headline
    assert "NaN or Inf in" in nan.got
    assert nan.location.step <= step + 1

    what, step = fired["kv-bit-flip"]
    page, layer = re.search(r"swa page (\d+)", what)[1], re.search(r"layer (\d+)", what)[1]
    flip = found("kv-changed", "sliding")
    assert f"SWA page {page}, " in flip.headline
    assert f"of layer {layer}, " in flip.headline
    assert flip.location.step <= step + 1

    what, _ = fired["kv-write-freed"]
    page, slot = re.search(r"full page (\d+) slot (\d+)", what).groups()
    freed = found("write-after-free", "full")
    assert f"FULL page {page} was written after it was freed (KV slot {slot}, " in freed.headline
    assert not re.search(r"kv-integrity is (off|limited)|page ledger is off", log)
