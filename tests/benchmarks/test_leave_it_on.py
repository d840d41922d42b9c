"""A figure holds its goal only if its whole interval does."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
import leave_it_on
from measuring import results
from measuring.overhead import Figure
from served import gate
from test_overhead import rows

from g4debug.findings.status import Limit, TracerStatus
from g4debug.tracers.page_table import watch

pytestmark = pytest.mark.once("the code is ours alone")


@pytest.mark.parametrize(
    ("low", "high", "rounds", "goal", "word"),
    [
        (-0.01, 0.005, 12, 0.005, "holds"),
        (-0.01, 0.005, 11, 0.005, "too few rounds"),
        (-0.01, -0.001, 12, 0.005, "faster than without"),
        (-0.01, 0.006, 12, 0.005, "not told"),
        (0.006, 0.009, 9, 0.005, "FAILS"),
        (0.0, 0.0, 1, 0.005, "one round: no interval"),
        (0.5, 0.6, 9, None, ""),
    ],
)
def test_the_interval_decides_and_not_the_median(low, high, rounds, goal, word):
    figure = Figure((low + high) / 2, low, high, rounds)
    twin = Figure(0.0, -0.001, 0.001, rounds)
    assert leave_it_on.Verdict(1, "watch", "first token", figure, goal, twin).word == word


@pytest.mark.parametrize("twin", [None, (0.001, 0.002), (-0.002, -0.001), (-0.003, 0.003)])
def test_nothing_holds_where_two_servers_alike_differ(twin):
    figure = Figure(0.0, -0.001, 0.001, 12)
    alike = None if twin is None else Figure(0.0, *twin, 12)
    it = leave_it_on.Verdict(1, "watch", "first token", figure, 0.005, alike)
    assert it.word == "two servers alike differ"


def test_what_was_measured_is_judged_against_its_own_goal(tmp_path, capsys):
    times = {
        (str(n), variant): [10 * slower] * 4
        for n in range(12)
        for variant, slower in (("off", 1.0), ("watch", 1.01), ("armed", 1.01), ("off-again", 1.3))
    }
    found = list(leave_it_on.judge(rows(times)))
    words = {(it.batch, it.variant, it.word) for it in found if it.metric == "first token"}
    assert words == {
        (1, "watch", "FAILS"), (1, "armed", "two servers alike differ"), (1, "off-again", ""),
        *((n, variant, "not measured") for n in (8, 64) for variant in ("watch", "armed")),
    }  # fmt: skip
    leave_it_on.write(found, tmp_path / "verdict.csv")
    with (tmp_path / "verdict.csv").open() as source:
        read = list(csv.DictReader(source))
    assert len(read) == len(found) == 7 * 5
    assert tuple(read[0]) == leave_it_on.COLUMNS
    assert len(leave_it_on.table(found)) == 2 + 7


def test_a_run_without_rounds_proves_nothing(tmp_path, capsys):
    assert leave_it_on.concluded(tmp_path) == 1
    assert "no round was measured" in capsys.readouterr().err


GOOD = {"off": 1.0, "off-again": 1.0, "watch": 1.001, "armed": 1.01}
JUDGED = {"tape_steps": 9, "lacks": "", "findings": 0}


def measured(folder, slower=GOOD, batches=(1, 8, 64), rounds=12, **servers):
    """What a run would have left: (folder with) requests and servers."""
    found = [
        row
        for batch in batches
        for row in rows(
            {(f"1.{n}.0", v): [10 * by] * 4 for n in range(rounds) for v, by in slower.items()},
            batch,
        )
    ]
    results.Growing(folder / "requests.csv").add(found, "a GPU")
    told = [{"variant": v, "copy": 0, **JUDGED, **servers.get(v, {})} for v in slower]
    results.Growing(folder / "servers.csv").add(told, "a GPU")
    return leave_it_on.concluded(folder)


def test_a_whole_run_within_the_goals_holds(tmp_path, capsys):
    assert measured(tmp_path) == 0
    assert "30 of 30 figures hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (
            {"slower": {n: GOOD[n] for n in ("off", "off-again", "armed")}, "batches": (1,),
             "rounds": 2},
            "0 of 30 figures hold",
        ),
        ({"batches": (1,)}, "10 of 30 figures hold"),
        ({"slower": {**GOOD, "watch": 0.95}}, "15 of 30 figures hold"),
        ({"slower": {**GOOD, "off-again": 1.3}}, "0 of 30 figures hold"),
        ({"slower": {**GOOD, "off-again": 0.7}}, "0 of 30 figures hold"),
        ({"slower": {"off": 1.0, "watch": 1.001, "armed": 1.01}}, "0 of 30 figures hold"),
        ({"watch": {"tape_steps": -1}}, "watch 0: its tape had ended"),
        ({"armed": {"lacks": "page-table: off"}}, "armed 0: 0 findings; lacks page-table: off"),
        ({"watch": {"findings": 2}}, "watch 0: 2 findings; lacks nothing"),
    ],
)  # fmt: skip
def test_a_run_that_shows_nothing_does_not_pass(tmp_path, capsys, run, says):
    assert measured(tmp_path, **run) == leave_it_on.DOES_NOT_HOLD
    assert says in capsys.readouterr().out


def test_servers_that_do_not_say_whether_they_judged_show_nothing(tmp_path, capsys):
    measured(tmp_path)
    (tmp_path / "servers.csv").unlink()
    assert leave_it_on.concluded(tmp_path) == leave_it_on.DOES_NOT_HOLD
    assert "servers.csv does not say" in capsys.readouterr().out
    # The columns of a run before this.
    results.Growing(tmp_path / "servers.csv").add([{"variant": "watch", "copy": 0}], "a GPU")
    assert leave_it_on.concluded(tmp_path) == leave_it_on.DOES_NOT_HOLD
    assert "watch 0: it is not known whether it judged" in capsys.readouterr().out


def test_what_a_server_lacks_by_design_is_no_doubt():
    """Watch keeps no books, and says so."""
    limits = (Limit("ranges only", watch.WHY), Limit("of a draft", "so it is", documented=True))
    assert list(gate.lacks([TracerStatus("page-table", "contain", limits)])) == []
    dead = TracerStatus("page-table", "contain", (Limit("x", "y"),), dead=("site: gone",))
    assert list(gate.lacks([dead])) == ["page-table: x", "page-table: site: gone"]
    assert list(gate.lacks([TracerStatus("tape", off="full")])) == ["tape: off"]
