"""kv-writes on a real engine: silent where all is well; each fault is caught, or contained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_engine import ENGINE, WhenAsked, drive

pytestmark = [*ENGINE, pytest.mark.once("what it tests is the same code on every release")]
DRIVER = Path(__file__).with_name("drive_writes.py")
# Prefix hits, chunked prefill, retraction through a small pool, aborts.
HEALTHY = Path(__file__).parents[1] / "page_table" / "drive_healthy.py"
SEED = 4
FAULTS = {
    "write-out-of-range": {"out-of-range", "negative"},
    "write-twice": {"written-twice"},
    "write-foreign": {"other-request"},
}
FIRED = re.compile(
    rf"g4debug fault \(seed={SEED}\) (write-[a-z-]+) #1: target (\w+): token (\d+) of row (\d+) is "
    r"written to slot (\d+), .* \[step (\d+): "
)
ONE = "1*on@mode=target_verify"
# Each in a forward of its own: the prefill, and two verifies.
THREE = (
    f"seed={SEED};write-out-of-range=1*on@mode=extend;write-twice=1*on@mode=target_verify@at=4;"
    "write-foreign=1*on@mode=target_verify@at=7"
)

LONG = pytest.mark.long("an engine for each fault")
NAMES = [pytest.param(name, marks=() if name == "write-foreign" else LONG) for name in FAULTS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines."""
    folder = tmp_path_factory.mktemp("engine")

    def run(name, driver=DRIVER, **environ):
        return lambda: drive(folder / name, str(driver), **environ)

    armed = {"G4DEBUG_TRACE": "kv-writes"}
    both = {"G4DEBUG_TRACE": "kv-writes,page-table"}
    found = {
        f"{name}{how}": run(f"{name}{how}", **environ, G4DEBUG_FAULTS=f"seed={SEED};{name}={ONE}")
        for name in FAULTS
        for how, environ in (("", {}), (" caught", armed))
    }
    found |= {  # one wrong location among hundreds need not change an answer
        name: run(name, G4DEBUG_FAULTS=f"seed={SEED};{name}=on@mode=target_verify")
        for name in ("write-twice", "write-foreign")
    }
    return WhenAsked(
        plain=run("plain"),
        contain=run("contain", **armed, G4DEBUG_MODE="contain", G4DEBUG_FAULTS=THREE),
        healthy=run("healthy", HEALTHY),
        healthy_armed=run("healthy_armed", HEALTHY, **both),
        **found,
    )


@pytest.mark.parametrize("name", NAMES)
def test_without_the_tracer_the_user_is_told_nothing_of_it(runs, name):
    """Either an answer is wrong, or the server dies of something else."""
    run = runs[name]
    assert FIRED.search(run.log), run.log[-3000:]
    if run.status == 0:
        assert run.result != runs["plain"].result
    else:
        assert name == "write-out-of-range"
        assert "IndexError: index" in run.log  # on a GPU, an illegal memory access, or nothing


@pytest.mark.parametrize("name", NAMES)
def test_with_it_the_server_stops_in_that_step_and_names_the_token(runs, name):
    run = runs[f"{name} caught"]
    assert run.status != 0
    assert "RESULT" not in run.log
    (record,) = run.dumps
    finding, where = record.finding, record.finding.location
    ((_, mode, position, row, slot, step),) = FIRED.findall(run.log)
    assert finding.check == "kv-writes"
    assert finding.kind in FAULTS[name]
    assert (where.step, where.forward_mode) == (int(step), mode.upper())
    assert where.request in record.steps[-1].rids
    assert "IndexError" not in run.log
    if finding.kind != "written-twice":  # there it may be the other one that is named
        assert where.row == int(row)
        assert f"token {position} (request {where.request}, row {row})" in finding.headline
    if where.layer_kind == "full":
        assert f"slot {slot}" in finding.headline
    assert run.log.index(finding.headline) < run.log.index("Scheduler hit an exception")


def test_another_requests_page_is_named_with_its_owner(runs):
    (record,) = runs["write-foreign caught"].dumps
    finding = record.finding
    (owner,) = re.findall(r"page \d+ of request (len\d+), but its place is slot", finding.headline)
    assert owner != finding.location.request
    assert f"was handed out to request {owner} for tokens" in finding.owner
    assert "is still held" in finding.owner
    assert finding.history
    assert record.events


def test_contain_mode_writes_to_the_right_place_and_the_answers_are_right(runs):
    run = runs["contain"]
    assert run.status == 0, run.log[-3000:]
    assert {name for name, *_ in FIRED.findall(run.log)} == set(FAULTS)
    kinds = {record.finding.kind for record in run.dumps}
    assert kinds <= set().union(*FAULTS.values())
    for name, of_fault in FAULTS.items():
        assert kinds & of_fault, name
    assert run.result == runs["plain"].result


@pytest.mark.long("two engines; test_modes_engine.py has a healthy one")
def test_a_healthy_server_is_left_alone(runs):
    run, plain = runs["healthy_armed"], runs["healthy"]
    assert (run.status, plain.status) == (0, 0), run.log[-3000:]
    assert run.dumps == []
    assert run.result == plain.result
    assert "armed: kv-writes, page-table (raise)" in run.log
    assert not re.search(
        r"g4debug: (kv-writes|page-table(?!: prefill on)|the page ledger)", run.log
    )
    assert "SGLang's own tables do not confirm it" not in run.log
    assert "Retract requests" in run.log
