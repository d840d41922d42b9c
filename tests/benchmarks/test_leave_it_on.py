"""A figure holds its goal only if its whole interval does."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
import leave_it_on
from measuring.overhead import Figure
from test_overhead import rows

pytestmark = pytest.mark.once("the code is ours alone")


@pytest.mark.parametrize(
    ("low", "high", "rounds", "goal", "word"),
    [
        (-0.01, 0.005, 9, 0.005, "holds"),
        (-0.01, 0.006, 9, 0.005, "not told"),
        (0.006, 0.009, 9, 0.005, "FAILS"),
        (0.0, 0.0, 1, 0.005, "one round: no interval"),
        (0.5, 0.6, 9, None, ""),
    ],
)
def test_the_interval_decides_and_not_the_median(low, high, rounds, goal, word):
    figure = Figure((low + high) / 2, low, high, rounds)
    assert leave_it_on.Verdict(1, "watch", "first token", figure, goal).word == word


def test_what_was_measured_is_judged_against_its_own_goal(tmp_path, capsys):
    times = {
        (str(n), variant): [10 * slower] * 4
        for n in range(4)
        for variant, slower in (("off", 1.0), ("watch", 1.01), ("armed", 1.01), ("off-again", 1.3))
    }
    found = list(leave_it_on.judge(rows(times)))
    words = {(it.variant, it.word) for it in found if it.metric == "first token"}
    assert words == {("watch", "FAILS"), ("armed", "holds"), ("off-again", "")}
    leave_it_on.write(found, tmp_path / "verdict.csv")
    with (tmp_path / "verdict.csv").open() as source:
        read = list(csv.DictReader(source))
    assert len(read) == len(found) == 3 * 5
    assert tuple(read[0]) == leave_it_on.COLUMNS
    assert len(leave_it_on.table(found)) == 2 + 3


def test_a_run_without_rounds_proves_nothing(tmp_path, capsys):
    assert leave_it_on.concluded(tmp_path) == 1
    assert "no round was measured" in capsys.readouterr().err
