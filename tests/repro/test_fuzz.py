"""repro/fuzz.py: a seed is a server, and a finding on a healthy one is never excused."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest

REPRO = Path(__file__).parents[2] / "repro"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="needs sglang: the workloads import it"
)
CHECKED = {name: {"things": 3} for name in ("page-table", "pool-leak", "swa-allocator")}


@pytest.fixture
def fuzz(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module("fuzz")


@pytest.fixture
def ran(fuzz, tmp_path):
    """``ran(log, status, checked)``: what a server did. A status of None: it took too long."""

    def outcome(log="g4debug-repro: engine up\n", status=0, checked=CHECKED):
        path = tmp_path / "armed.log"
        path.write_text(log)
        result = {"requests": 7, "facts": {}, "checked": checked} if status == 0 else {}
        return fuzz.Outcome("armed", status, 1.0, path, result)

    return outcome


def test_a_seed_is_a_server(fuzz):
    shapes = [fuzz._fuzz.draw(seed) for seed in range(200)]
    assert shapes == [fuzz._fuzz.draw(seed) for seed in range(200)]
    assert len({shape.words for shape in shapes}) > 190
    for shape in shapes:
        engine = shape.engine
        room = engine["max_total_tokens"] * engine["swa_full_tokens_ratio"]
        assert room >= fuzz._fuzz.longest_prompt(engine["max_total_tokens"]) + 256
        if engine["page_size"] != 64:  # trtllm_mha has pages of 64
            assert engine["attention_backend"] == "triton"
        if engine.get("enable_priority_scheduling"):  # SGLang refuses it with any other
            assert engine["schedule_policy"] == "fcfs"
    for key, values in {"page_size": 3, "attention_backend": 3, "enable_mixed_chunk": 2,
                        "speculative_num_steps": 5, "schedule_policy": 6}.items():  # fmt: skip
        assert len({shape.engine.get(key) for shape in shapes}) == values, key


def test_a_server_that_did_all_and_was_checked_is_good(fuzz, ran, tmp_path):
    assert fuzz.trouble(ran(), tmp_path) == ""


@pytest.mark.parametrize(
    ("log", "status", "checked", "said"),
    [
        ("", 0, {**CHECKED, "pool-leak": {"steps": 9}}, "checked nothing: pool-leak"),
        ("", 1, CHECKED, "did not complete (exit status 1)"),
        ("", None, CHECKED, "took too long"),
        ("g4debug: the page ledger is off\n", 0, CHECKED, "g4debug failed"),
    ],
)
def test_what_is_not_well_is_named(fuzz, ran, tmp_path, log, status, checked, said):
    assert said in fuzz.trouble(ran(log, status, checked), tmp_path)


def test_a_finding_is_quoted(fuzz, ran, tmp_path):
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "one.pt").write_text("")
    log = "g4debug: page-table in decode: wrong page\n  expected: x\n"
    assert (
        fuzz.trouble(ran(log, 1), tmp_path)
        == "a finding: g4debug: page-table in decode: wrong page"
    )


def test_only_what_sglang_does_alone_is_excused(fuzz, ran):
    armed = ran(status=1)
    good, said = fuzz.blame("It took too long", armed, ran(status=0))
    assert not good
    assert said == "It took too long. Without tracers it completes."
    assert not fuzz.blame("a finding: g4debug: page-table in decode: x", armed, ran(status=1))[0]
    hang = "a finding: g4debug: flight-recorder: the scheduler hangs"
    assert fuzz.blame(hang, armed, ran(status=None))[0]
    good, said = fuzz.blame("It took too long", armed, ran(status=None))
    assert good
    assert said.startswith("SGLang's own: It took too long")
    up = ran(status=1)
    down = dataclasses.replace(up, log=up.log.with_name("plain.log"))
    down.log.write_text("ValueError: refused\n")
    assert not fuzz.blame("x", up, down)[0]  # the two died at different places
