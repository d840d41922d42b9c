"""repro/fuzz.py: a seed is a server, and a finding on a healthy one is never excused."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug.dumps import writing

REPRO = Path(__file__).parents[2] / "repro"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="needs sglang: what is drawn depends on its release",
)


def tracer(name, checks=3, off=""):
    checked = [{"what": "things", "count": checks}] if checks else []
    return {"name": name, "checked": checked, "off": off}


STATUS = [tracer(n) for n in ("page-table", "pool-leak", "kv-allocator", "spec-lifecycle")]


@pytest.fixture
def fuzz(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module("fuzz")


@pytest.fixture
def ran(fuzz, tmp_path):
    """``ran(log, status, tracers)``: what a server did. A status of None: it took too long."""
    logs = []

    def outcome(log="", status=0, tracers=STATUS):
        logs.append(tmp_path / f"{len(logs)}.log")
        logs[-1].write_text(f"g4debug-repro: engine up\n{log}")
        result = {"requests": 7, "facts": {}, "status": tracers} if status == 0 else {}
        return fuzz.Outcome("armed", status, 1.0, logs[-1], result)

    return outcome


def dump(folder, check="page-table", name="one.pt"):
    record = sample_record()
    finding = dataclasses.replace(record.finding, check=check)
    writing.write(
        writing.encode(dataclasses.replace(record, finding=finding)), folder / "dumps", name
    )


def test_a_seed_is_a_server(fuzz):
    draw = importlib.import_module("suites.fuzz.draw")
    shapes = [fuzz.draw(seed) for seed in range(200)]
    assert shapes == [fuzz.draw(seed) for seed in range(200)]
    assert len({shape.words for shape in shapes}) > 190
    for shape in shapes:
        engine = shape.engine
        room = engine["max_total_tokens"] * engine["swa_full_tokens_ratio"]
        assert room >= draw.longest_prompt(engine["max_total_tokens"]) + 256
        if engine["page_size"] != 64:  # trtllm_mha has pages of 64
            assert engine["attention_backend"] == "triton"
        if engine.get("enable_priority_scheduling"):  # SGLang refuses it with any other
            assert engine["schedule_policy"] == "fcfs"
    for key, values in {"page_size": 3, "attention_backend": 3, "enable_mixed_chunk": 2,
                        "speculative_num_steps": 5, "schedule_policy": 6}.items():  # fmt: skip
        assert len({shape.engine.get(key) for shape in shapes}) == values, key


@pytest.mark.parametrize(
    ("log", "tracers", "said"),
    [
        ("", [*STATUS[:3], tracer("spec-lifecycle", 0)], "Checked nothing: spec-lifecycle."),
        ("", [tracer("page-table", off="a reason"), *STATUS[1:]], "Off: page-table (a reason)."),
        ("g4debug: the page ledger is off\n", STATUS, "g4debug failed: "),
    ],
)
def test_a_tracer_that_does_not_work_is_not_excused(fuzz, ran, tmp_path, log, tracers, said):
    assert fuzz.trouble(ran(), True, tmp_path) == ""
    assert said in fuzz.trouble(ran(log, tracers=tracers), True, tmp_path)


def test_spec_lifecycle_judges_without_a_draft_too(fuzz, monkeypatch):
    draw = importlib.import_module("suites.fuzz.draw")
    monkeypatch.setattr(fuzz.targets, "counts_with_result", lambda: True)
    assert fuzz.follows_tokens(draw.Shape(False, {}))
    assert fuzz.follows_tokens(draw.Shape(True, {"enable_mixed_chunk": True}))
    assert not fuzz.follows_tokens(draw.Shape(False, {"enable_mixed_chunk": True}))
    monkeypatch.setattr(fuzz.targets, "counts_with_result", lambda: False)
    assert not fuzz.follows_tokens(draw.Shape(False, {}))


def test_only_spec_lifecycle_may_have_nothing_to_judge(fuzz, ran, tmp_path):
    assert fuzz.trouble(ran(tracers=STATUS[:3]), False, tmp_path) == ""
    off = [*STATUS[:3], tracer("spec-lifecycle", 0, "there is no draft")]
    assert fuzz.trouble(ran(tracers=off), False, tmp_path) == ""
    assert "there is no draft" in fuzz.trouble(ran(tracers=off), True, tmp_path)
    assert "spec-lifecycle" in fuzz.trouble(ran(tracers=STATUS[:3]), True, tmp_path)


def test_what_the_recorder_keeps_accuses_nobody_and_any_other_dump_does(fuzz, ran, tmp_path):
    dump(tmp_path, "flight-recorder", "a.pt")
    assert fuzz.trouble(ran(status=1), True, tmp_path) == ""
    dump(tmp_path, "page-table", "b.pt")
    both = fuzz.trouble(ran("g4debug: the page ledger is off\n", status=1), True, tmp_path)
    assert both == f"A finding: {sample_record().finding.headline}"


HANG = "Traceback (most recent call last):\nasyncio.exceptions.TimeoutError\n"


def test_only_what_sglang_does_alone_proves_nothing(fuzz, ran):
    verdict, said = fuzz.blame(ran(status=None), ran())
    assert verdict == "bad"
    assert said.endswith("Without tracers it completes.")
    assert ".." not in said
    assert fuzz.blame(ran(status=None), ran(status=None))[0] == "proves nothing"
    at = [ran(f"RuntimeError: request {n} has no room\n", status=1) for n in (12, 345)]
    verdict, said = fuzz.blame(*at)
    assert verdict == "proves nothing"
    assert "RuntimeError: request N has no room" in said
    ours = ran("RuntimeError: request 1 has no room\nKeyError: 'ledger'\n", status=1)
    verdict, said = fuzz.blame(ours, at[0])
    assert verdict == "bad"
    assert "KeyError: 'ledger'" in said
    assert fuzz.blame(ran(HANG, status=1), ran(status=None))[0] == "bad"


@pytest.fixture
def servers(fuzz, ran, monkeypatch):
    """``servers(armed, bare)``: what each server does in this test. Gives those that were run."""
    started = []

    def put(armed, bare):
        def start(seed, with_tracers, folder, model):
            started.append(with_tracers)
            if with_tracers and armed == "finding":
                dump(folder)
                return ran(status=1)
            what = armed if with_tracers else bare
            return ran(status=None) if what == "hangs" else ran()

        monkeypatch.setattr(fuzz, "start", start)
        told = (False, "states differ") if armed == "decides otherwise" else (True, "9 of 9")
        monkeypatch.setattr(fuzz, "replayed", lambda folder: told)
        return started

    return put


@pytest.mark.parametrize(
    ("armed", "bare", "code", "said", "runs"),
    [
        ("completes", "completes", 0, "2 good, 0 bad, 0 proves nothing.", [True, True]),
        ("decides otherwise", "completes", 1, "0 good, 2 bad, 0 proves nothing.", [True, True]),
        ("finding", "hangs", 1, "0 good, 2 bad, 0 proves nothing.", [True, True]),
        ("hangs", "completes", 1, "0 good, 2 bad, 0 proves nothing.", [True, False] * 2),
        # Where no server did what it was asked for, nothing was tried.
        ("hangs", "hangs", 1, "0 good, 0 bad, 2 proves nothing.", [True, False] * 2),
    ],
)
def test_the_exit_code(fuzz, servers, monkeypatch, tmp_path, capsys, armed, bare, code, said, runs):
    started = servers(armed, bare)
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--servers", "2", "--results", str(tmp_path)])
    assert fuzz.main() == code
    assert said in capsys.readouterr().out
    assert started == runs
    assert len(list(tmp_path.glob("*/dumps/*.pt"))) == (2 if armed == "finding" else 0)


def test_the_result_is_written_as_a_page_when_asked(fuzz, servers, monkeypatch, tmp_path):
    servers("hangs", "completes")
    out = tmp_path / "page.md"
    words = ["fuzz.py", "--first", "5", "--servers", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*words, "--results", str(tmp_path)])
    assert fuzz.main() == 1
    text = out.read_text()
    assert "the seeds 5 to 6," in text
    assert "2 bad." in text
    assert text.count("Without tracers it completes. |") == 2


@pytest.mark.parametrize(("words", "first"), [([], 10_001), (["--first", "7"], 7)])
def test_corruptions_begin_where_all_forms_are_drawn(fuzz, monkeypatch, tmp_path, words, first):
    ran = []
    monkeypatch.setattr(fuzz.corrupt, "run", lambda console, *given: ran.append(given) or True)
    given = ["--corrupt", "--runs", "3", "--results", str(tmp_path), "--out", "x.md", *words]
    monkeypatch.setattr("sys.argv", ["fuzz.py", *given])
    assert fuzz.main() == 0
    assert ran == [(first, 3, tmp_path, Path("x.md"))]
