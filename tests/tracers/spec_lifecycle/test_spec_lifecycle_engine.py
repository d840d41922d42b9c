"""spec-lifecycle on a real engine with speculative decoding v2, under overlap scheduling."""

from __future__ import annotations

import re
from pathlib import Path

import drive_spec
import pytest
from real_engine import ENGINE, drive, side_by_side

from g4debug.hooking import targets

pytestmark = [
    *ENGINE,
    pytest.mark.skipif(
        targets.path("worker.seed_step") is not None,
        reason="speculative decoding v2 only: SGLang 0.5.14 and later",
    ),
]
DRIVER = Path(drive_spec.__file__)
ARMED = {"G4DEBUG_TRACE": "spec-lifecycle", "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"}
# These break nothing.
STRESS = "seed=1;forced-retract=20%6*on;abort-request=5%2*on"
# Kind -> a fault that shows it, each in a step of its own. A bonus token may strike a request that
# has ended, which nobody minds, so it strikes several times.
FAULTS = {
    "seq-len": "seq-len-off-by-one=1*device@at=8",
    "stale-hidden-state": "stale-hidden-state=1*on@at=6",
    "bookkeeping": "double-bookkeeping=1*verify-ct@at=4",
    "publish-order": "publish-order=1*twice@at=2",
    "bonus-token": "bonus-token=30%6*on",
}
VALUES = {
    "sampled-token": "sampled-token=1*on",
    "verify-input": "verify-input=1*positions@at=2",
    "verify-result": "verify-result=1*token@at=4",
}
FATAL = {"accept-length": "accept-length=1*zero"}  # the scheduler does not outlive it
FIRED = re.compile(r"g4debug fault \(seed=3\) ([a-z-]+) #\d+: .* \[step (\d+): ")


@pytest.mark.parametrize(
    "load",
    ["mixed", pytest.param("mixed-no-radix", marks=pytest.mark.long("two engines more"))],
)
def test_a_sound_server_is_silent_and_its_tokens_are_the_same(tmp_path, load):
    runs = side_by_side(
        plain=lambda: drive(tmp_path / "plain", str(DRIVER), load),
        armed=lambda: drive(tmp_path / "armed", str(DRIVER), load, **ARMED, G4DEBUG_FAULTS=STRESS),
    )
    plain, armed = runs["plain"], runs["armed"]
    assert (plain.status, armed.status) == (0, 0), armed.log[-3000:]
    assert armed.dumps == []
    assert "spec-lifecycle in " not in armed.log
    assert "spec-lifecycle is limited" not in armed.log
    # The workload does what it is for: no fault is armed in this run.
    assert "KV cache pool is full. Retract requests" in plain.log
    assert "Retract requests" in armed.log
    assert ("#cached-token: 192" in armed.log) == (load == "mixed")
    # When an abort strikes is not the same.
    both = plain.result.keys() & armed.result.keys()
    assert len(both) >= 20
    assert {k: armed.result[k] for k in both} == {k: plain.result[k] for k in both}


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(FAULTS, id="several"),
        pytest.param(VALUES, id="of values", marks=pytest.mark.long("other faults")),
        pytest.param(FATAL, id="a fatal one", marks=pytest.mark.long("other faults")),
    ],
)
def test_a_fault_is_found_on_a_real_engine(tmp_path, faults):
    run = drive(
        tmp_path / "run",
        str(DRIVER),
        "faults",
        **ARMED,
        G4DEBUG_MODE="log",
        G4DEBUG_FAULTS=";".join(["seed=3", *faults.values()]),
    )
    fired = set(FIRED.findall(run.log))
    assert {name for name, _ in fired} == {fault.partition("=")[0] for fault in faults.values()}
    found = {(record.finding.kind, record.finding.location.step) for record in run.dumps}
    for kind, fault in faults.items():
        steps = {int(step) for name, step in fired if name == fault.partition("=")[0]}
        if kind == "bookkeeping":  # the finding names the step whose result is processed then
            steps |= {step - 1 for step in steps}
        assert steps & {step for k, step in found if k == kind}, kind
    for record in run.dumps:
        assert record.finding.reference
        assert not record.transitions[-1].ok
