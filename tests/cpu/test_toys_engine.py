"""Each toy model, served by real SGLang with every tracer armed in mode `raise`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import releases
import told_status
from real_engine import ENGINE, drive

from g4debug import discovery
from g4debug.cpu import toys

DRIVER = Path(__file__).with_name("drive_toy.py")
REFERENCE = DRIVER.with_name("drive_reference.py")
ARMED = {"G4DEBUG_TRACE": ",".join(discovery.names("tracer")), "G4DEBUG_MODE": "raise"}
# Without it a decode step on triton does not see the oldest key of the window, which is SGLang's.
WHOLE_WINDOW = {"G4DEBUG_FIX_TRITON_DECODE_WINDOW": "1"}
IN_CI = ("gpt-oss", "trtllm_mha")  # an SWA pool, sinks and experts
CASES = [
    pytest.param(
        name,
        backend,
        id=f"{name}-{backend}",
        marks=() if (name, backend) == IN_CI else pytest.mark.long("an engine for each model"),
    )
    for name in discovery.names("toy")
    for backend in toys.load(name).backends
]
# What is not judged there, and is said so.
LINEAR = {"pool-leak": {"not the states of linear layers"}}
FETCHES = {("deepseek", "trtllm_mla")}
CHUNKED = {"page-table": {"some of fa3's page tables are not judged"}}
FETCHED = {"page-table": {"what a prefill of MLA reads of its prefix"}}


def limits_of(name: str, backend: str) -> dict[str, set[str]]:
    if name == "lfm2":
        return LINEAR
    if name == "qwen3-next":  # whose prefix cache keeps states, too
        return LINEAR | {"prefix-cache": {"not the states of linear layers"}}
    if name == "llama-4":
        return CHUNKED
    # The others of MLA read a short prefix from pages.
    return FETCHED if (name, backend) in FETCHES else {}


pytestmark = ENGINE


def test_a_fault_on_gpt_oss_is_told(tmp_path):
    """The answers of its healthy engine are compared below, with every tracer armed, too."""
    name, backend = IN_CI
    releases.only_where_entered(name, backend)
    arguments = json.dumps({"attention_backend": backend, "log_level": "info"})
    fault = {"G4DEBUG_FAULTS": "seed=1;early-swa-free=1*on"}
    run = drive(tmp_path, str(DRIVER), name, arguments, **ARMED, **fault)
    assert run.status != 0
    first = min((record.finding for record in run.dumps), key=lambda f: f.location.step)
    assert first.check in discovery.load("fault", "early-swa-free").caught_by
    assert f"g4debug: {first.check}" in run.log


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_it_is_served_armed_in_silence_and_its_tokens_are_right(name, backend, tmp_path):
    """Right: those of an engine without tracers, and those of transformers."""
    releases.only_where_entered(name, backend)
    arguments = json.dumps({"attention_backend": backend, "log_level": "info"})
    bare = drive(tmp_path / "bare", str(DRIVER), name, arguments, **WHOLE_WINDOW)
    armed = drive(tmp_path / "armed", str(DRIVER), name, arguments, **WHOLE_WINDOW, **ARMED)
    for run in (bare, armed):
        assert run.status == 0, run.log[-3000:]
        assert not run.dumps
    assert "[scheduler] armed: " in armed.log
    told = told_status.read(armed.log)
    assert set(told) == set(discovery.names("tracer"))
    # The flight recorder counts nothing: it waits for a stand-still.
    assert {n for n, tracer in told.items() if told_status.blind(tracer)} == {"flight-recorder"}
    assert told_status.limits(told) == limits_of(name, backend)
    assert armed.results == bare.results
    assert len(bare.results) == 2
    answers = [found for wave in bare.results for found in wave]
    assert all(len(set(found["tokens"])) > len(found["tokens"]) // 2 for found in answers)
    if name != "gemma-4":  # whose config is in SGLang's words, not in those of transformers
        file = tmp_path / "answers"
        file.write_text(json.dumps(answers))
        said = drive(tmp_path / "reference", str(REFERENCE), name, str(file)).result
        assert said["wrong"] == [[]] * len(answers)
        assert not any(said["loading"].values())  # neither tensor too many nor one too few


@pytest.mark.once("it is served on the newest release only")
@pytest.mark.long("four engines")
def test_qwen3_next_answers_the_same_however_its_states_are_kept(tmp_path):
    """In chunks and whole, without a prefix cache and from one, which keeps the states of chunks or
    those of whole requests. Above, its tokens are compared with a prefill of them all."""
    found = {}
    for name, arguments in {
        "kept by chunks": {},
        "kept by requests": {
            "attention_backend": "flashinfer", "page_size": 1, "disable_overlap_schedule": True,
        },
        "whole": {"disable_radix_cache": True, "chunked_prefill_size": 2048},
        "in small chunks": {"disable_radix_cache": True, "chunked_prefill_size": 64},
    }.items():  # fmt: skip
        given = json.dumps({"attention_backend": "trtllm_mha", "log_level": "info", **arguments})
        run = drive(tmp_path / name, str(DRIVER), "qwen3-next", given)
        assert run.status == 0, run.log[-3000:]
        again = sum(map(int, re.findall(r"#cached-token: (\d+)", run.log)))
        assert bool(again) == name.startswith("kept"), again
        found[name] = run.results
    (first, second) = found["whole"]
    assert first == second
    assert all(results == found["whole"] for results in found.values())
