"""repro/fuzz.py --corrupt: a seed is a corruption, every one can come, and each is graded."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from g4debug.hooking import targets

REPRO = Path(__file__).parents[2] / "repro"
pytestmark = pytest.mark.skipif(
    targets.sglang_version() is None, reason="needs sglang: what is struck is its own"
)


@pytest.fixture
def suite(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    names = ("corruption", "strike", "grade", "forks", "corrupt")
    return SimpleNamespace(**{n: importlib.import_module(f"suites.fuzz.{n}") for n in names})


def test_a_seed_is_a_corruption(suite):
    draw = suite.corruption.draw
    assert [draw(seed, True) for seed in range(50)] == [draw(seed, True) for seed in range(50)]
    assert len({draw(seed, True) for seed in range(50)}) == 50


@pytest.mark.parametrize("mtp", [True, False])
def test_every_class_can_come(suite, mtp):
    it = suite.corruption
    drawn = [it.draw(seed, mtp) for seed in range(3000)]
    whats = {name for name in it.WHAT if mtp or name not in it.SPECULATIVE}
    assert {c.what for c in drawn} == whats
    moments = {(w, m) for w in whats for m in it.WHAT[w][1] if mtp or m != it.VERIFY}
    assert {(c.what, c.moment) for c in drawn} == moments
    values = {(w, to) for w in whats for to in it.TO if to not in it.NO.get(w, ())}
    assert {(c.what, c.to) for c in drawn} == values
    assert {c.pool for c in drawn} == {"full", "swa"}
    assert {c.slot for c in drawn} == {"first", "middle", "last"}
    assert {c.mode for c in drawn} == set(it.MODES)
    assert {suite.corrupt.server_of(seed) for seed in range(8)} == set(suite.corrupt.SERVERS)


def test_each_has_somebody_who_knows_where_it_is(suite):
    assert all(hasattr(suite.strike.Strike, f"_{what}") for what in suite.corruption.WHAT)
    assert set(suite.grade.CANNOT_SEE) <= set(suite.corruption.WHAT)


def case(suite, **more):
    given = {
        "seed": 1, "what": "next_tokens", "moment": "result", "to": "next", "step": 3, "mode": "",
        "pool": "full", "request": 0.0, "place": 0.99, "slot": "first",
    }  # fmt: skip
    return suite.corruption.Corruption(**{**given, **more})


def test_it_strikes_once_at_its_step_and_in_its_mode(suite):
    clock = SimpleNamespace(step=2)
    strike = suite.strike.Strike(case(suite, mode="DECODE"), None, lambda: clock.step)

    def tokens(mode, moment="result"):
        result = SimpleNamespace(next_token_ids=torch.tensor([5, 6]))
        strike.at(moment, mode, returned=result)
        return result.next_token_ids.tolist()

    assert tokens("DECODE") == [5, 6]  # too early
    clock.step = 3
    assert tokens("EXTEND") == tokens("DECODE", "step") == [5, 6]
    assert strike.fired is None
    assert tokens("TARGET_VERIFY") == [5, 7]
    assert strike.fired == {
        "step": 3, "mode": "TARGET_VERIFY", "words": "next_token_ids[1]: 6 -> 7"
    }  # fmt: skip
    assert tokens("DECODE") == [5, 6]
    assert strike.failed == ""


def test_a_mistake_of_the_suite_is_told_apart(suite):
    strike = suite.strike.Strike(case(suite, what="row", moment="step", step=0), None, lambda: 1)
    strike.requests["a"] = object()
    strike.at("step")
    assert strike.failed
    assert suite.grade.grade("row", {"failed": strike.failed}, {}).verdict == "broken"


PLAIN = {"tokens": {"a": [1, 2]}, "disarmed": ["spec-lifecycle is off: nothing to check"]}
FIRED = {"fired": {"step": 5}, "tokens": PLAIN["tokens"], "disarmed": PLAIN["disarmed"]}
FINDING = {"check": "page-table", "kind": "stale", "step": 7, "headline": "g4debug: page-table"}


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        ({**FIRED, "finding": FINDING, "tokens": {"a": [9]}}, "told"),
        ({**FIRED, "findings": [["pool-leak", "lost", 1]]}, "told"),
        (FIRED, "harmless"),
        ({**FIRED, "tokens": {"a": [9]}}, "missed"),
        ({**FIRED, "error": "IndexError: …"}, "missed"),
        ({**FIRED, "finding": FINDING, "disarmed": ["ledger is off: …"]}, "disarmed"),
        ({**FIRED, "fired": None, "finding": FINDING}, "false"),
        ({**FIRED, "fired": None}, "nothing"),
    ],
)
def test_what_comes_of_it_is_graded(suite, got, verdict):
    graded = suite.grade.grade("row", got, PLAIN, page="nothing is said")
    assert graded.verdict == verdict
    if graded.tracer == "page-table" and verdict == "told":
        assert graded.late == 2


def test_what_cannot_be_seen_must_be_said_by_the_page(suite):
    wrong = {**FIRED, "tokens": {"a": [9]}}
    (begin, *_) = suite.grade.CANNOT_SEE["kv"]
    graded = suite.grade.grade("kv", wrong, PLAIN, f"One. It is so that\n{begin} here. Three.")
    assert graded.verdict == "listed"
    assert graded.text == f"It is so that {begin} here."
    assert suite.grade.grade("kv", wrong, PLAIN, "One. Three.").verdict == "missed"


def test_the_page_says_each_sentence(suite):
    page = suite.grade.TRACERS.read_text()
    for what, sentences in suite.grade.CANNOT_SEE.items():
        assert all(suite.grade.sentence(what, page) for _ in sentences), what
        assert suite.grade.sentence(what, "") == ""


def test_nothing_is_compared_with_a_server_that_is_not_sound(suite):
    unfit = suite.corrupt.unfit
    good = {"tokens": {"a": [1]}}
    assert unfit(good, good) == ""
    assert "different tokens" in unfit(good, {"tokens": {"a": [2]}})
    assert "no requests" in unfit({"tokens": {}}, {"tokens": {}})
    assert "traffic" in unfit({}, good)
    assert "false" in unfit({**good, "finding": FINDING}, good)
    assert "ends" in unfit(good, {**good, "error": "it stood still"})


def test_a_run_prints_a_table_and_a_line_of_json_for_each(suite, monkeypatch, tmp_path):
    from rich.console import Console

    def launch(module, arguments, environ, armed, folder, timeout):
        folder.mkdir(parents=True)
        for name in ("plain", "again"):
            (folder / f"{name}.json").write_text(json.dumps(PLAIN))
        for seed in arguments["seeds"]:
            found = {**FIRED, "finding": FINDING} if seed < 8 else {**FIRED, "tokens": {}}
            (folder / f"{seed}.json").write_text(json.dumps(found))
        return SimpleNamespace(completed=True)

    monkeypatch.setattr(suite.corrupt, "launch", launch)
    with Path(tmp_path / "out").open("w") as sink:
        console = Console(file=sink, width=200)
        assert suite.corrupt.run(console, 1, 7, tmp_path / "good")
        bad = suite.corrupt.run(console, 8, 3, tmp_path / "bad")
    lines = [json.loads(x) for x in (tmp_path / "good" / "cases.jsonl").read_text().splitlines()]
    assert sorted(line["seed"] for line in lines) == list(range(1, 8))
    assert {line["verdict"] for line in lines} == {"told"}
    said = (tmp_path / "out").read_text()
    assert "7 told" in said
    page = suite.grade.TRACERS.read_text()
    seeds = [(s, suite.corrupt.SERVERS[suite.corrupt.server_of(s)][0]) for s in (8, 9, 10)]
    whats = [suite.corruption.draw(*seed).what for seed in seeds]
    assert bad is False
    assert said.count("missed") > sum(not suite.grade.sentence(w, page) for w in whats)
