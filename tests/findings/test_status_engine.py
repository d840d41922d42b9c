"""The status of real engines: what survives a failure of ours, and what a live server tells."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import drive_tracers
import failing_record
import production_files
import psutil
import pytest
import releases
from cpu_server import served
from real_engine import ENGINE, drive

from g4debug.cli import main

pytestmark = [*ENGINE, pytest.mark.once("what it tests is the same code on every release")]
FAILS_AT = 5


@pytest.fixture(scope="module", autouse=True)
def failing(tmp_path_factory):
    """It runs beside the other test, which sleeps most of the time."""
    folder = tmp_path_factory.mktemp("engine")
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(engine_that_cannot_record_a_step, folder)


def engine_that_cannot_record_a_step(folder):
    return drive(
        folder,
        str(Path(drive_tracers.__file__)),
        PYTHONPATH=failing_record.installed(folder / "plugin"),
        FAILS_AT=str(FAILS_AT),
        G4DEBUG_TRACE="pool-leak,kv-integrity,flight-recorder",
        G4DEBUG_LEAK_STEPS="4",
        G4DEBUG_MODE="log",
        # The first pages that are freed are lost; a census after the failure must see it.
        G4DEBUG_FAULTS="seed=1;lost-free=1*on",
        SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",  # or SGLang stops, if it gets to look
    )


def generate(url: str, tokens: int) -> None:
    body = {
        "text": "w10 w20 w30",
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        json.load(answer)


def scrape(url: str, of: str = "g4debug_") -> dict[str, float]:
    """Every sample whose name begins so: the text before its value -> the value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith(of))
    return {name: float(value) for name, _, value in samples}


def total(samples: dict[str, float], metric: str, **labels: str) -> float:
    wanted = [f'{k}="{v}"' for k, v in labels.items()]
    return sum(
        v for k, v in samples.items() if k.startswith(metric + "{") and all(w in k for w in wanted)
    )


def ask(capsys: pytest.CaptureFixture[str], pid: int) -> tuple[int, dict]:
    code = main(["doctor", "--pid", str(pid), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_live_server_tells_its_status_and_its_metrics(tmp_path, capsys):
    """Real ``launch_server``, in log mode, with a fault that fires after the first requests."""
    environ = {
        "G4DEBUG_TRACE": "page-table,kv-allocator,pool-leak",
        "G4DEBUG_MODE": "log",
        "G4DEBUG_FAULTS": "seed=1;page-zero=1*on@mode=target_verify@step=40",
        "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(tmp_path / "dumps"),
    }
    flags = ["--enable-metrics", "--log-level", "warning"]
    if releases.has_v1_worker():  # later ones have MTP under overlap scheduling, 0.5.23 only so
        flags.append("--disable-overlap-schedule")
    log = tmp_path / "server.log"
    with served(flags, log, 300, environ) as (url, first):
        generate(url, 24)
        time.sleep(2.5)  # it tells its status once in a second
        code, told = ask(capsys, first)
        (scheduler,) = [p for p in told["processes"] if p["role"] == "scheduler"]
        assert (code, told["sound"]) == (0, True), told["headline"]
        assert scheduler["phase"] == "serving"
        assert scheduler["step"] > 3
        assert scheduler["rank"] == "tp 0, pp 0, dp 0"
        tracers = {t["name"]: t for t in scheduler["tracers"]}
        assert set(tracers) >= {"page-table", "kv-allocator", "pool-leak", "ledger"}
        assert {c["what"] for c in tracers["page-table"]["checked"]} == {"tables", "steps"}
        first = scrape(url)
        for name in ("page-table", "kv-allocator", "pool-leak"):
            assert total(first, "g4debug_armed", tracer=name, tp_rank="0") == 1
            assert total(first, "g4debug_checks_total", tracer=name) > 0
        assert total(first, "g4debug_findings_total") == 0

        generate(url, 200)  # the fault fires
        time.sleep(2.5)
        second = scrape(url)
        found = total(second, "g4debug_findings_total", tracer="page-table")
        assert found > 0
        exported = {name.partition("{")[0] for name in {**second, **scrape(url, "sglang:")}}
        for query, _ in production_files.queries():  # of docs/production.md
            assert production_files.metrics(query) <= exported, query
        for name in ("page-table", "pool-leak"):
            before = total(first, "g4debug_checks_total", tracer=name)
            assert total(second, "g4debug_checks_total", tracer=name) > before
        _, told = ask(capsys, scheduler["pid"])
        (only,) = told["processes"]
        page_table = next(t for t in only["tracers"] if t["name"] == "page-table")
        assert sum(page_table["findings"].values()) == found

        # A scheduler that is stopped tells nothing, and doctor says so.
        psutil.Process(scheduler["pid"]).suspend()
        try:
            time.sleep(16)
            code, told = ask(capsys, scheduler["pid"])
        finally:
            psutil.Process(scheduler["pid"]).resume()
        assert code == 1
        assert "the process is stopped" in told["headline"]


def test_a_step_that_cannot_be_recorded_stops_nothing_else(failing):
    run = failing.result()
    assert run.status == 0, run.log[-4000:]
    assert run.result == [drive_tracers.OUTPUT] * 2 * len(drive_tracers.LENGTHS)
    told = f"g4debug: the step recorder is limited since step {FAILS_AT}: its hook record_step"
    assert run.log.count(told) == 1
    leak = next(r for r in run.dumps if r.finding.check == "pool-leak")
    assert leak.finding.location.step > FAILS_AT
    status = {t.name: t for t in leak.tracers}
    assert [x.step for x in status["step-recorder"].limits] == [FAILS_AT]
    assert status["pool-leak"].sound
    assert status["kv-integrity"].sound
    checked = {(n, c.what): c for n, t in status.items() for c in t.checked}
    censuses = checked["pool-leak", "censuses"]
    assert censuses.count >= 2
    assert censuses.step > FAILS_AT
    assert checked["kv-integrity", "steps"].step > FAILS_AT
    assert max(s.step for s in leak.steps) == FAILS_AT - 1
