"""mm_piecewise_parity's verdicts, on logs as a H200 wrote them; the runs need a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

REPRO = Path(__file__).parents[2] / "repro"
UP = "g4debug-repro: engine up"
CAPTURED = (
    "[2026-11-21 10:02:33] Capture piecewise CUDA graph end. Time elapsed: 13.24 s. "
    "mem usage=1.46 GB. avail mem=58.40 GB."
)
BEGAN = "[2026-11-21 10:02:20] Capture piecewise CUDA graph begin. avail mem=59.87 GB"
ILLEGAL = (
    "[2026-11-21 10:02:33] Piecewise CUDA Graph failed with error: Triton Error [CUDA]: "
    "an illegal memory access was encountered"
)
OTHER = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
REFUSED = "g4debug: SGLANG_ENABLE_PIECEWISE_CUDA_GRAPH_FOR_MM=1 is refused for this model: …"
TOKENS = [[n, n + 1, n + 2] for n in range(20)]
WRONG = [[0, 0, 0] for _ in TOKENS]
KILLED = -9  # the status that SGLang leaves after SIGQUIT


@pytest.fixture
def parity(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module("mm_piecewise_parity")


@pytest.fixture
def outcome(parity, tmp_path):
    """A run's log and, if it completed, its outputs."""

    def made(variant, *log, tokens=None, status=0):
        path = tmp_path / f"{variant}.log"
        path.write_text("\n".join(log) + "\n")
        result = {} if tokens is None else {"tokens": tokens}
        return parity.Outcome(variant, status, 1.0, path, result)

    return made


@pytest.fixture
def eager(outcome):
    return outcome("eager", UP, tokens=TOKENS)


@pytest.mark.parametrize(("tokens", "equal"), [(TOKENS, 20), (WRONG, 0), ([*TOKENS[:19], [9]], 19)])
def test_an_allowed_geometry_is_equal_and_a_refused_one_is_not(
    parity, outcome, eager, tokens, equal
):
    graphs = outcome("graphs", BEGAN, CAPTURED, UP, tokens=tokens)
    text = f"{equal} of 20 outputs equal the eager ones."
    assert parity.judge_equal(graphs, eager) == (equal == 20, text)
    good, why = parity.judge_refusable(graphs, eager)
    assert good is (equal < 20)
    assert why.startswith(text)
    assert ("reason enough to refuse it" in why) is (equal < 20)


def test_an_enforced_run_that_captures_and_dies_of_an_illegal_access(parity, outcome, eager):
    graphs = outcome("graphs", BEGAN, CAPTURED, UP, ILLEGAL, status=KILLED)
    good, why = parity.judge_refusable(graphs, eager)
    assert good
    assert why == (
        "It captures the graphs, then it dies: an illegal memory access was encountered. "
        "That is reason enough to refuse it."
    )
    good, why = parity.judge_equal(graphs, eager)  # an allowed geometry may not die
    assert not good
    assert "did not complete (exit status -9)" in why


@pytest.mark.parametrize(
    "log",
    [
        (BEGAN, ILLEGAL),  # died in the capture: nothing is known of a replay
        (BEGAN, CAPTURED, UP, OTHER),
        (BEGAN, CAPTURED, UP),
        (UP, ILLEGAL),  # no graph at all
    ],
    ids=["in the capture", "of something else", "of nothing that it said", "without graphs"],
)
def test_an_enforced_run_that_dies_of_something_else_is_no_reason(parity, outcome, eager, log):
    good, why = parity.judge_refusable(outcome("graphs", *log, status=KILLED), eager)
    assert not good
    assert why == "It did not complete (exit status -9)."


def test_an_enforced_run_that_was_stopped_for_its_time_is_no_reason(parity, outcome, eager):
    graphs = outcome("graphs", BEGAN, CAPTURED, UP, status=None)
    assert parity.judge_refusable(graphs, eager)[0] is False


def test_it_did_not_die_of_what_it_survived(parity, outcome, eager):
    graphs = outcome("graphs", BEGAN, CAPTURED, UP, ILLEGAL, tokens=TOKENS)
    good, why = parity.judge_refusable(graphs, eager)
    assert not good
    assert "dies" not in why


@pytest.mark.parametrize(
    ("log", "tokens", "status", "word"),
    [
        ((UP, ILLEGAL), None, KILLED, "there is no good run to compare it with"),
        ((BEGAN, CAPTURED, UP), TOKENS, 0, "It captured piecewise CUDA graphs"),
        ((UP,), WRONG, 0, "only 1 different outputs of 20"),
    ],
    ids=["died", "not eager", "says one thing"],
)
def test_without_a_good_eager_run_nothing_is_said(parity, outcome, log, tokens, status, word):
    eager = outcome("eager", *log, tokens=tokens, status=status)
    graphs = outcome("graphs", BEGAN, CAPTURED, UP, tokens=TOKENS)
    for judge in (parity.judge_equal, parity.judge_refusable):
        good, why = judge(graphs, eager)
        assert not good
        assert word in why
    dead = outcome("dead", BEGAN, CAPTURED, UP, ILLEGAL, status=KILLED)
    good, why = parity.judge_refusable(dead, eager)
    assert not good
    assert word in why
    assert parity.judge_eager(eager).good is False


def test_graphs_that_captured_none_prove_nothing(parity, outcome, eager):
    graphs = outcome("graphs", UP, tokens=TOKENS)
    good, why = parity.judge_equal(graphs, eager)
    assert not good
    assert why == "It captured no piecewise CUDA graphs."


def test_a_refusal_is_a_line_and_a_death(parity, outcome):
    assert parity.judge_refused(outcome("r", REFUSED, status=1)) == (True, REFUSED)
    assert parity.judge_refused(outcome("r", REFUSED, UP, tokens=TOKENS))[0] is False
    good, why = parity.judge_refused(outcome("r", OTHER, status=1))
    assert not good
    assert why == "It was not refused."
