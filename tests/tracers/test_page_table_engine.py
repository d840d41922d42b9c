"""The whole way on a real engine: fault, guard, trap, dump; contained, and raised."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from drive_engine import LENGTHS, OUTPUT

from g4debug import dump
from g4debug.record import TrapRecord

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
DRIVER = Path(__file__).with_name("drive_engine.py")
HEALTHY = Path(__file__).with_name("drive_healthy.py")
# Several cells of both tables, and twice where there are two forwards: more findings than kinds.
CHAIN = (
    "1*corrupt(8)@mode=extend@runner=target"
    "->2*corrupt(8)@mode=decode@runner=draft"
    "->2*corrupt(8)@mode=target_verify@runner=target"
)
# One firing of each other fault. Stale-tail comes first: it must see the tables before the others.
EACH = {
    "page-stale-tail": "1*on@mode=target_verify",
    "page-off-by-one": "1*on@mode=extend@runner=target",
    "page-negative": "1*on@mode=target_verify@step=5",
    "page-zero": "1*on@mode=target_verify@step=6",
    "page-alias": "1*on@mode=target_verify@step=7",
    "page-pool-swap": "1*on@mode=decode@runner=draft@step=8",
}
FIRED = re.compile(r"g4debug fault \(seed=4\) (page-[a-z-]+) #1: .* \[step (\d+): ")


@dataclass
class Run:
    status: int
    log: str
    dumps: list[TrapRecord]


def drive(folder: Path, driver: Path = DRIVER, **environ: str) -> Run:
    folder.mkdir()
    log = folder / "log"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "g4debug.cpu", str(driver)],
            env={
                **clean,
                "G4DEBUG_TRACE": "page-table",
                "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"),
                **environ,
            },
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    found = sorted((folder / "dumps").glob("*"), key=lambda p: p.stat().st_mtime_ns)
    return Run(status, log.read_text(errors="replace"), [dump.read(p) for p in found])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both engines, at the same time."""
    folder = tmp_path_factory.mktemp("engine")
    with ThreadPoolExecutor(2) as pool:
        contained = pool.submit(
            drive,
            folder / "contain",
            G4DEBUG_MODE="contain",
            G4DEBUG_FAULTS=f"seed=1;page-oob={CHAIN}",
        )
        raised = pool.submit(
            drive, folder / "raise", G4DEBUG_FAULTS="seed=2;page-oob=1*on@mode=target_verify"
        )
        return {"contain": contained.result(), "raise": raised.result()}


@pytest.fixture(scope="module")
def each(tmp_path_factory):
    faults = ";".join(["seed=4", *(f"{name}={chain}" for name, chain in EACH.items())])
    folder = tmp_path_factory.mktemp("each") / "run"
    return drive(folder, G4DEBUG_MODE="contain", G4DEBUG_FAULTS=faults)


def test_each_fault_is_found_in_the_step_in_which_it_fires(each):
    assert each.status == 0, each.log[-3000:]
    fired = {name: int(step) for name, step in FIRED.findall(each.log)}
    assert set(fired) == set(EACH)
    found = {record.finding.location.step: record.finding for record in each.dumps}
    assert set(found) <= set(fired.values())
    kinds = {name: found[step].kind for name, step in fired.items() if step in found}
    # Contain mode dumps a kind once: what stale-tail leaves may be of a kind that was seen.
    assert set(fired) - set(kinds) <= {"page-stale-tail"}
    assert kinds["page-negative"] == "negative"
    assert kinds["page-zero"] == "page-zero"
    assert kinds["page-alias"] == "other-request"
    assert kinds.get("page-stale-tail", "stale") in ("stale", "other-request", "mismatch")
    assert kinds["page-off-by-one"] in ("stale", "other-request", "mismatch")
    swapped = found[fired["page-pool-swap"]]
    assert swapped.kind == "full-index-in-swa-table" or swapped.location.layer_kind == "full"
    assert "of request len" in found[fired["page-alias"]].headline


def test_the_history_of_a_page_is_in_the_dump(each):
    for record in each.dumps:
        assert record.finding.history, record.finding
        assert len(record.finding.history) == len(record.events)
        assert record.finding.owner


def test_a_healthy_server_is_left_alone(tmp_path):
    """Prefix hits, chunked prefill, retraction through a small pool, aborts."""
    run = drive(tmp_path / "healthy", HEALTHY)
    assert run.status == 0, run.log[-3000:]
    assert "RESULT" in run.log
    assert run.dumps == []
    assert "g4debug: page-table" not in run.log
    assert "g4debug: the page ledger failed" not in run.log
    assert "Retract requests" in run.log


def kind(record: TrapRecord) -> tuple[str, str, str]:
    where = record.finding.location
    return where.runner, where.forward_mode, where.layer_kind


def test_contain_mode_serves_on(runs):
    run = runs["contain"]
    assert run.status == 0, run.log[-3000:]
    (line,) = [x for x in run.log.splitlines() if x.startswith("RESULT")]
    assert json.loads(line.split(" ", 1)[1]) == [OUTPUT] * len(LENGTHS) * 2
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
    for record in [*runs["contain"].dumps, *runs["raise"].dumps]:
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
    assert record.tracers == {"page-table": "armed: contain"}
    assert record.fixes["swa-state-swap"].startswith("not-needed")
    assert record.faults
    assert record.faults[0].startswith("page-oob #1: target extend")
    assert {p.name for p in record.pools} == {"full", "swa"}
    assert all(p.used_tokens > 0 for p in record.pools)
    assert record.geometry["attention_backend"] == "trtllm_mha"
    assert record.geometry["page_size"] == 64
    assert record.environment["G4DEBUG_MODE"] == "contain"


def test_raise_mode_stops_with_the_finding_before_anything_else(runs):
    run = runs["raise"]
    assert run.status != 0
    assert "RESULT" not in run.log
    (record,) = run.dumps
    assert kind(record)[:2] == ("target", "TARGET_VERIFY")
    assert "illegal memory access" not in run.log
    assert "g4debug.trap.TrapError: " + record.finding.headline in run.log
    assert run.log.index(record.finding.headline) < run.log.index("Scheduler hit an exception")
