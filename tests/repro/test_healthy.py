"""repro/healthy.py as a user runs it, on its short subset, and its verdicts on runs that must not
pass: a finding, other tokens, a tracer that checked nothing, a feature that did not come into play.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

REPRO = Path(__file__).parents[2] / "repro"
PAGE = Path(tempfile.gettempdir()) / "g4debug-test-healthy.md"
SCRIPT = ("healthy.py", "--only", "short", "--out", str(PAGE))
CHECKERS = 6  # tracers that check something; the flight recorder keeps steps


@pytest.mark.long("two engines, with and without tracers, and five workloads")
@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines")
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_the_short_subset_runs_without_a_finding(script):
    done = script()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(r"5 workloads, \d+ requests, \d+ checks, no finding\.", done.stdout)
    page = PAGE.read_text()
    (engine,) = (line for line in page.splitlines() if line.startswith("| `short` |"))
    counts = [int(cell) for cell in engine.split("|")[3:-2]]
    assert len(counts) == CHECKERS
    assert all(counts)
    assert "no: " in engine  # sessions
    assert "ended by EOS" in page


@pytest.fixture
def healthy(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module("suites.healthy.run")


@pytest.fixture
def group(healthy):
    return importlib.import_module("suites.healthy.groups").group_of("short")


@pytest.fixture
def runs(healthy, group, tmp_path):
    """Two runs, without tracers and with all of them, that must pass."""
    outcome = importlib.import_module("harness.processes").Outcome
    result = {
        workload.id: {
            "outputs": {"a": [[1, 2, 3]]},
            "requests": 1,
            "facts": {"answers": 1},
            "problem": "",
            "s": 1.0,
            "checked": {tracer: {"checks": 5} for tracer in healthy.on_one_rank()},
            "status": [],
            "ranks": 1,
        }
        for workload in group.workloads
    }
    made = []
    for name in ("plain", "armed"):
        log = tmp_path / f"{name}.log"
        log.write_text("g4debug-repro: engine up\n")
        made.append(outcome(name, 0, 1.0, log, copy.deepcopy(result)))
    return made


def test_what_must_pass_passes(healthy, group, runs, tmp_path):
    ran = healthy.judge(group, *runs, tmp_path)
    assert ran.good
    assert len(ran.done) == 5
    healthy.keep(ran, tmp_path / "kept")
    assert healthy.kept(group, tmp_path / "kept") == ran


def test_a_finding(healthy, group, runs, tmp_path):
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "g4debug-pool-leak-x.pt").touch()
    told = "[2026] g4debug: pool-leak while busy: 5 pages of the full pool …\n  expected: that …\n"
    runs[1].log.write_text(f"g4debug: swa-ratio: keeping the ratio\n{told}")
    ran = healthy.judge(group, *runs, tmp_path)
    assert ran.problem.startswith("a finding: g4debug: pool-leak while busy: 5 pages")
    healthy.keep(ran, tmp_path / "kept")
    assert healthy.kept(group, tmp_path / "kept") is None  # it has to run again


@pytest.mark.parametrize("passed", [True, False])
def test_a_replay(healthy, group, runs, tmp_path, monkeypatch, passed):
    monkeypatch.setattr(healthy.replays, "replayed", lambda folder: (passed, "9 of 9"))
    ran = healthy.judge(group, *runs, tmp_path)
    healthy.replay(ran, tmp_path)
    assert (ran.good, ran.replayed) == ((True, "9 of 9") if passed else (False, ""))
    table = importlib.import_module("suites.healthy.table")
    assert ("Replayed: 9 of 9." if passed else "replayed: 9 of 9") in table.block(ran).what
    assert ("| 9 of 9 |" in table.markdown([ran], None)) == passed


def test_a_finding_of_an_earlier_run_is_not_one_of_this(healthy, group, runs, tmp_path):
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "g4debug-pool-leak-x.pt").touch()
    healthy.forget(tmp_path)
    assert healthy.judge(group, *runs, tmp_path).good


def test_a_tracer_that_failed(healthy, group, runs, tmp_path):
    runs[1].log.write_text(
        "g4debug: pool-leak is limited: its hook check is off. This is a failure of g4debug: …"
    )
    assert "its hook check is off" in healthy.judge(group, *runs, tmp_path).problem


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda found: found["outputs"].update(a=[[1, 2, 4]]), "other tokens than without"),
        (lambda found: found["outputs"].update(b=[[1]]), "other tokens than without"),
        (lambda found: found["checked"].update({"kv-integrity": {"pages": 0}}), "checked nothing"),
        (lambda found: found["checked"].pop("page-table"), "checked nothing: page-table"),
        (lambda found: found["checked"].update({"page-table": {"steps": 9}}), "checked nothing"),
        (lambda found: found.update(problem="ended by EOS: 0"), "ended by EOS: 0"),
        (lambda found: found.update(ranks=2), "2 schedulers show a status, expected 1"),
    ],
)
def test_a_workload_that_proves_nothing(healthy, group, runs, tmp_path, change, problem):
    change(runs[1].result["eos"])
    ran = healthy.judge(group, *runs, tmp_path)
    assert not ran.good
    (bad,) = (done for done in ran.done if done.problem)
    assert (bad.workload.id, bad.problem[: len(problem)]) == ("eos", problem)


def test_of_several_ranks_the_one_with_the_fewest_checks_counts(healthy):
    first = {"page-table": {"tables": 5, "steps": 1}, "pool-leak": {"pools": 2}}
    second = {"page-table": {"tables": 0, "steps": 9}, "pool-leak": {"pools": 3}}
    assert healthy.checked_of(healthy.fewest([first, second])) == {"page-table": 0, "pool-leak": 2}
    assert healthy.fewest([]) == {}


def test_each_rank_of_a_group_has_a_status(group):
    assert group.ranks == 1
    engine = {**group.engine, "pp_size": 2, "tp_size": 2}
    assert dataclasses.replace(group, engine=engine).ranks == 4


def test_a_tracer_that_was_excused_and_did_check(healthy, group, runs, tmp_path):
    """An excuse that is not true any more would hide that the tracer goes blind there."""
    excused = dataclasses.replace(group, idle={"page-table": "why"})
    ran = healthy.judge(excused, *runs, tmp_path)
    assert {done.problem for done in ran.done} == {
        "checked something, and the group says that it cannot: page-table"
    }


def test_a_tracer_that_is_off(healthy, group, runs, tmp_path):
    off = {"name": "pool-leak", "limits": [], "off": "a bug"}
    runs[1].result["eos"]["status"] = [off]
    assert healthy.judge(group, *runs, tmp_path).problem == "pool-leak is off: a bug"


def test_an_engine_that_died(healthy, group, runs, tmp_path):
    runs[1].status = 1
    assert healthy.judge(group, *runs, tmp_path).problem.startswith("with tracers: ")
    runs[1].status, runs[0].status = 0, 1
    assert healthy.judge(group, *runs, tmp_path).problem.startswith("without tracers: ")
    del runs[1].result["eos"]
    assert not healthy.judge(group, *runs, tmp_path).good


def test_the_armed_engines_alone_leave_the_server_out_and_write_no_page(healthy, capsys):
    script = importlib.import_module("healthy")
    known = {name: SimpleNamespace(short=name == "short") for name in ("mtp", "short", "plain")}
    assert script.chosen(known, None) == ["mtp", "plain", "server"]
    assert script.chosen(known, None, armed_only=True) == ["mtp", "plain"]
    assert script.chosen(known, ["server"], armed_only=True) == ["server"]


def test_the_armed_engine_alone_is_no_compared_one(healthy, monkeypatch, tmp_path):
    script, begun = importlib.import_module("healthy"), []
    group = SimpleNamespace(refused="", workloads=[SimpleNamespace(compare=True)])
    judged = SimpleNamespace(good=False)
    monkeypatch.setattr(script, "start", lambda group, armed, folder: begun.append(armed) or armed)
    monkeypatch.setattr(script, "judge", lambda group, plain, armed, folder: judged)
    assert script.run(group, tmp_path) is judged
    assert sorted(begun) == [False, True]
    begun.clear()
    script.run(group, tmp_path, compare=False)
    assert begun == [True]
