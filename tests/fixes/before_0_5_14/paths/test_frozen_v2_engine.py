"""frozen-kv-mtp-v2 on a real engine: v1's tokens, ends, logprobs and numbers of verify steps.

v2 runs with every tracer armed, in raise mode, under SGLang's strict leak check.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_engine import ENGINE, drive, side_by_side

DRIVER = Path(__file__).with_name("drive_frozen_v2.py")
ON = {"SGLANG_FROZEN_KV_MTP_V2": "1"}
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
ARMED = {
    "G4DEBUG_TRACE": "flight-recorder,kv-integrity,kv-writes,page-table,pool-leak,spec-lifecycle,"
    "kv-allocator",
    "G4DEBUG_LEAK_STEPS": "16",
}
TRITON = {"attention_backend": "triton"}
pytestmark = [*ENGINE, pytest.mark.written_for("frozen-kv-mtp-v2")]


def same_logprobs(got, wanted, where):
    """Each is a list of (logprob, token)."""
    assert [token for _, token in got] == [token for _, token in wanted], where
    values = [value for value, _ in wanted]
    assert [value for value, _ in got] == pytest.approx(values, abs=1e-4), where


@pytest.mark.parametrize(
    "arguments",
    [
        ({},),
        ({"page_size": 16, "disable_radix_cache": True, "speculative_num_steps": 5,
          "speculative_num_draft_tokens": 6},),
        ({"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}, "short"),
        ({"max_running_requests": 1}, "short"),
        (TRITON, "short"),
        ({**TRITON, "page_size": 1}, "short"),
        ({"tp_size": 2}, "short"),
    ],
    ids=["default", "pages of 16, no radix cache, 5 steps", "1 step", "1 request", "triton",
         "triton, pages of 1", "two ranks"],
)  # fmt: skip
def test_the_answers_of_v1(tmp_path, arguments):
    given = [a if isinstance(a, str) else json.dumps(a) for a in arguments]

    def run(name, **environ):
        return drive(tmp_path / name, str(DRIVER), *given, **environ)

    runs = side_by_side(
        v1=lambda: run("v1", **STRICT),
        v2=lambda: run("v2", **ON, **STRICT, **ARMED),
    )
    v1, v2 = runs["v1"], runs["v2"]
    assert (v1.status, v2.status) == (0, 0), v1.log[-3000:] + v2.log[-3000:]
    assert not v2.dumps
    assert "frozen-kv-mtp-v2: overlap scheduling stays on" in v2.log
    limited = [x for x in v2.log.splitlines() if "limited" in x and "g4debug: " in x]
    limited = [x for x in limited if "its values are followed from SGLang 0.5.15 on" not in x]
    of_one = any(isinstance(a, dict) and a.get("page_size") == 1 for a in arguments)
    assert all(of_one and "such pages are only counted" in x for x in limited), limited
    assert "frozen-kv-mtp-v2" not in v1.log.replace("frozen-kv-mtp-v2 (off)", "")
    assert [r["round"] for r in v1.results] == [r["round"] for r in v2.results]
    for mine, theirs in zip(v2.results, v1.results, strict=True):
        pairs = zip(mine["requests"], theirs["requests"], strict=True)
        for i, (got, wanted) in enumerate(pairs):
            where = f"{mine['round']}, request {i}"
            for what in ("tokens", "text", "finish", "cached", "top"):
                assert got[what] == wanted[what], f"{where}: {what}"
            assert got["verifies"] == wanted["verifies"], where
            assert got["input"][1:] == pytest.approx(wanted["input"][1:], abs=1e-4), where
            same_logprobs(got["output"], wanted["output"], where)
            for a, b in zip(got["asked"], wanted["asked"], strict=True):
                same_logprobs(a, b, where)
    if "short" not in given:
        finished = {r["round"]: {x["finish"]["type"] for x in r["requests"]} for r in v1.results}
        assert finished["stop tokens"] == {"stop"}
        assert finished["stop strings"] == {"stop"}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("double-bookkeeping=1*kv", "bookkeeping"),
        ("accept-length=1*zero", "accept-length"),
        ("seq-len-off-by-one=1*plus", "seq-len"),
        ("verify-input-left=1*on", "verify-input-left"),
        ("allocated-len=1*on", "allocated-len"),
        ("bonus-token=1*on", "bonus-token"),
        ("future-row=1*read", "future-row"),
        ("future-row=1*stash", "bonus-token"),
        ("future-row=1*lost", "future-row"),
    ],
)
def test_what_is_wrong_is_found_in_its_step(tmp_path, fault, kind):
    environ = {**ON, "G4DEBUG_TRACE": "spec-lifecycle", "G4DEBUG_FAULTS": f"seed=3;{fault}"}
    run = drive(tmp_path, str(DRIVER), "{}", "short", **environ)
    assert run.status != 0
    assert [(d.finding.check, d.finding.kind) for d in run.dumps] == [("spec-lifecycle", kind)]


def test_a_page_that_v1s_counting_loses_is_found_by_pool_leak(tmp_path):
    environ = {**ON, "G4DEBUG_TRACE": "pool-leak", "G4DEBUG_LEAK_STEPS": "1"}
    fault = {"G4DEBUG_FAULTS": "seed=3;double-bookkeeping=1*kv"}
    run = drive(tmp_path, str(DRIVER), "{}", "short", **environ, **fault)
    assert run.status != 0
    assert [d.finding.check for d in run.dumps] == ["pool-leak"]


def test_a_grammar_is_refused_with_the_reason(tmp_path):
    run = drive(tmp_path, str(DRIVER), "{}", "short", "grammar", **ON, **STRICT)
    assert run.status == 0, run.log[-3000:]
    said = [r["requests"] for r in run.results if r["round"] == "refused"]
    assert len(said) == 2
    for text, name in zip(said, ("regex", "json_schema"), strict=True):
        assert f"{name} is not served with SGLANG_FROZEN_KV_MTP_V2=1" in text


def test_a_server_that_does_not_fit_stays_on_v1(tmp_path):
    given = json.dumps({"enable_custom_logit_processor": True})
    run = drive(tmp_path, str(DRIVER), given, "short", **ON)
    assert run.status == 0, run.log[-3000:]
    assert "not used, so the server stays on v1: SGLang's v2 verify does not call" in run.log
