"""The whole way on a real engine: fault, guard, trap, dump; contained, and raised."""

from __future__ import annotations

import re
from pathlib import Path

import drive_tracers
import pytest
from drive_tracers import LENGTHS, OUTPUT
from real_engine import ENGINE, WhenAsked, drive

from g4debug.findings.record import TrapRecord
from g4debug.hooking import targets

pytestmark = ENGINE
DRIVER = Path(drive_tracers.__file__)
HEALTHY = Path(__file__).with_name("drive_healthy.py")
# Several cells of both tables, and twice where there are two forwards: more findings than kinds.
CHAIN = (
    "1*corrupt(8)@mode=extend@runner=target"
    "->2*corrupt(8)@mode=decode@runner=draft"
    "->2*corrupt(8)@mode=target_verify@runner=target"
)
# One firing of each other fault, and what it is found as. Contain mode dumps a kind of finding
# once for each runner, forward mode and kind of layer: no two of these can be taken for one.
SEED = 131
WRONG = {"stale", "other-request", "mismatch"}
EACH = {
    "page-stale-tail": ("1*on@mode=decode@runner=draft", WRONG),
    "page-off-by-one": ("1*on@mode=extend@runner=target", WRONG),
    "page-negative": ("1*on@mode=target_verify@step=5", {"negative"}),
    "page-zero": ("1*on@mode=target_verify@step=6", {"page-zero"}),
    "page-alias": ("1*on@mode=target_verify@step=7", {"other-request"}),
    "page-pool-swap": ("1*on@mode=target_verify@step=8", WRONG | {"full-index-in-swa-table"}),
}
# In the table of the full pool, a page of the SWA pool is a wrong page like any other.
SWAPPED = {"swa": {"full-index-in-swa-table"}, "full": WRONG}
# There both pools hand out the same numbers in this workload, so that a swap changes nothing.
IN_LOCKSTEP = targets.matches("==0.5.15.post1")
FIRED = re.compile(
    rf"g4debug fault \(seed={SEED}\) (page-[a-z-]+) #1: (\w+) (\w+): (full|swa) table .* "
    r"\[step (\d+): "
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines."""
    folder = tmp_path_factory.mktemp("engine")

    def run(name, driver=DRIVER, *arguments, **environ):
        command = (str(driver), *arguments)
        return lambda: drive(folder / name, *command, G4DEBUG_TRACE="page-table", **environ)

    each = ";".join([f"seed={SEED}", *(f"{name}={chain}" for name, (chain, _) in EACH.items())])
    models = str(folder / "models")
    return WhenAsked(
        contain=run("contain", G4DEBUG_MODE="contain", G4DEBUG_FAULTS=f"seed=1;page-oob={CHAIN}"),
        raised=run("raised", G4DEBUG_FAULTS="seed=2;page-oob=1*on@mode=target_verify"),
        healthy=run("healthy", HEALTHY),
        one_pool=run("one_pool", HEALTHY, models),
        foreign=run("foreign", G4DEBUG_FAULTS="seed=3;row-foreign-page=1*on@at=3"),
        each=run("each", G4DEBUG_MODE="contain", G4DEBUG_FAULTS=each),
    )


def test_each_fault_is_found_in_the_step_in_which_it_fires(runs):
    run = runs["each"]
    assert run.status == 0, run.log[-3000:]
    fired, table = {}, {}
    for name, runner, mode, drawn, step in FIRED.findall(run.log):
        fired[name], table[name] = (runner, mode.upper(), int(step)), drawn
    due = {name: e for name, e in EACH.items() if not (IN_LOCKSTEP and name == "page-pool-swap")}
    assert set(fired) == set(due)
    assert len(set(fired.values())) == len(fired)
    found = {}
    for record in run.dumps:
        where = record.finding.location
        found[where.runner, where.forward_mode, where.step] = record.finding
    assert set(found) == set(fired.values())  # each at its own place, and nothing else
    assert len(run.dumps) == len(fired) == len(found)
    for name, (_, kinds) in due.items():
        finding = found[fired[name]]
        assert finding.kind in kinds, name
        layers = "sliding" if table[name] == "swa" else "full"
        assert finding.location.layer_kind == layers, name
    if "page-pool-swap" in due:
        assert found[fired["page-pool-swap"]].kind in SWAPPED[table["page-pool-swap"]]
    assert "of request len" in found[fired["page-alias"]].headline


def test_the_history_of_a_page_is_in_the_dump(runs):
    assert runs["each"].dumps
    for record in runs["each"].dumps:
        assert record.finding.history, record.finding
        assert len(record.finding.history) == len(record.events)
        assert record.finding.owner


@pytest.mark.parametrize(
    "name",
    ["healthy", pytest.param("one_pool", marks=pytest.mark.long("a model without windows"))],
)
def test_a_healthy_server_is_left_alone(runs, name):
    """Prefix hits, chunked prefill, retraction through a small pool, aborts."""
    run = runs[name]
    assert run.status == 0, run.log[-3000:]
    assert run.result
    assert run.dumps == []
    told = [
        line
        for line in run.log.splitlines()
        # Whether two requests with one beginning run at once is chance. One gets the other's pages.
        if "g4debug: page-table" in line and "the prefix cache has the same page there" not in line
    ]
    assert [line.rpartition("; ")[2] for line in told] == ["all guarded"], told
    assert "g4debug: the page ledger is off" not in run.log
    assert "SGLang's own tables do not confirm it" not in run.log  # not even a suspicion
    assert "Retract requests" in run.log


def kind(record: TrapRecord) -> tuple[str, str, str]:
    where = record.finding.location
    return where.runner, where.forward_mode, where.layer_kind


def test_contain_mode_serves_on(runs):
    run = runs["contain"]
    assert run.status == 0, run.log[-3000:]
    assert run.result == [OUTPUT] * len(LENGTHS) * 2
    assert "illegal memory access" not in run.log
    assert run.log.count("g4debug fault (seed=1) page-oob #") == 5 * 8


def test_one_dump_for_each_kind_of_finding_and_the_log_names_it(runs):
    run = runs["contain"]
    kinds = [kind(record) for record in run.dumps]
    assert set(kinds) == {
        (runner, mode, layer)
        for runner, mode in (("target", "EXTEND"), ("draft", "DECODE"), ("target", "TARGET_VERIFY"))
        for layer in ("full", "sliding")
    }
    assert len(kinds) == len(set(kinds))
    for record in run.dumps:
        assert run.log.count(record.finding.headline) == 1
    assert run.log.count("  dump:     ") == len(run.dumps)


def test_the_request_of_a_finding_is_the_one_whose_row_it_is(runs):
    records = [*runs["contain"].dumps, *runs["raised"].dumps]
    assert {r.finding.location.forward_mode for r in records} == {
        "EXTEND", "DECODE", "TARGET_VERIFY"
    }  # fmt: skip
    for record in records:
        where = record.finding.location
        prompt = int(where.request.removeprefix("len"))
        tokens = int(record.table.seq_lens[where.row - record.table.row0])
        if where.forward_mode == "EXTEND":
            assert tokens == prompt
        else:
            assert prompt <= tokens <= prompt + OUTPUT + 4
        assert where.request in record.steps[-1].rids
        assert record.steps[-1].step == where.step
        assert int(record.table.bad[0, 2]) >= record.table.pool.pages


def test_a_dump_tells_what_was_in_force(runs):
    record = runs["contain"].dumps[0]
    assert {t.name: t.state for t in record.tracers if t.mode} == {"page-table": "armed: contain"}
    assert record.fixes["swa-state-swap"].startswith("not-needed")
    assert record.faults
    assert record.faults[0].startswith("page-oob #1: target extend")
    assert {p.name for p in record.pools} == {"full", "swa"}
    assert all(p.used_tokens > 0 for p in record.pools)
    assert record.arguments["attention_backend"] == "trtllm_mha"
    assert record.arguments["page_size"] == 64
    assert record.environment["G4DEBUG_MODE"] == "contain"


def test_raise_mode_stops_with_the_finding_before_anything_else(runs):
    run = runs["raised"]
    assert run.status != 0
    assert "RESULT" not in run.log
    (record,) = run.dumps
    assert kind(record)[:2] == ("target", "TARGET_VERIFY")
    assert "illegal memory access" not in run.log
    assert "g4debug.trapping.trap.TrapError: " + record.finding.headline in run.log
    assert run.log.index(record.finding.headline) < run.log.index("Scheduler hit an exception")


def test_a_row_that_names_another_requests_page_stops_the_server_in_that_step(runs):
    run = runs["foreign"]
    assert run.status != 0
    assert "RESULT" not in run.log
    (record,) = run.dumps
    finding = record.finding
    assert finding.kind == "foreign-page"
    (fired,) = re.findall(
        r"row-foreign-page #1: row (\d+) of (len\d+) names page (\d+) of (len\d+) "
        r".* \[step (\d+): ",
        run.log,
    )
    row, victim, page, owner, step = fired
    assert (finding.location.request, finding.location.step) == (victim, int(step))
    assert f"reads full-pool page {page}" in finding.headline
    assert f"of request {owner} for" in finding.headline
    assert f"because row {row} of req_to_token names it" in finding.headline
