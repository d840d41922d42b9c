"""Real servers on the CPU engine: a combination that was never run does not start in `raise`.

The rules of the gate are tested in test_combinations.py, its table on a GPU in
tests/gpu/test_gate_gpu.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import told_status
from real_engine import ENGINE, boxes, drive, dumps_in

from g4debug.cpu.server import free_port

pytestmark = [*ENGINE, pytest.mark.once("other models are served on the newest release only")]
DRIVER = Path(__file__).parents[1] / "cpu" / "drive_toy.py"
ALL = "page-table,kv-allocator,spec-lifecycle,pool-leak,prefix-cache,flight-recorder"
NEVER_RUN = "That was never run with g4debug on SGLang 0.5.23 on the CPU engine: "
WAYS = ("G4DEBUG_MODE=log", "G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1", "G4DEBUG_TRACE=flight-recorder")
WEIGHTS = "Load weight begin"  # SGLang's, in the log of a server that loads them
# SGLang and the CPU engine serve Gemma-3 so, but nobody has looked whether g4debug judges it well.
GEMMA_3_ON_FA3 = ("gemma-3", json.dumps({"attention_backend": "fa3"}))
SAID_OF_IT = "this server runs Gemma3ForCausalLM (MHA, windows without an SWA pool, "


def refused(log: str) -> str:
    """The one line that refuses the start."""
    (line,) = (line for line in log.splitlines() if NEVER_RUN in line)
    assert line.startswith("g4debug: this server runs ")
    for way in WAYS:
        assert line.count(way) == 1
    return line


def test_a_server_is_refused_before_it_loads_weights_if_the_draft_alone_was_never_run(tmp_path):
    """`g4debug cpu-server`, as somebody types it: a draft of EAGLE's with a tree of paths."""
    port, log = free_port(), tmp_path / "log"
    words = "cpu-server --model llama --draft eagle --attention-backend triton --page-size 1"
    tree = "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    armed = {"SGLANG_TRTLLM_MHA_DEBUG": "1", "G4DEBUG_MODE": "raise"}
    with log.open("wb") as sink:
        done = subprocess.run(
            [*(sys.executable, "-m", "g4debug"), *f"{words} {tree} --port {port}".split()],
            env=clean | armed | {"SGLANG_TRTLLM_MHA_DEBUG_DIR": str(tmp_path / "dumps")},
            stdout=sink,
            stderr=subprocess.STDOUT,
            timeout=300,
            start_new_session=True,
        )
    text = log.read_text(errors="replace")
    assert done.returncode == 1, text[-3000:]
    line = refused(text)
    assert "LlamaForCausalLM (MHA, no window), draft EAGLE (a tree). " in line
    assert f"{NEVER_RUN}such a model was run with no draft on trtllm_mha, triton, fa3, " in line
    assert "G4DEBUG_MODE=raise could harm a healthy server" in line
    assert WEIGHTS not in text
    assert "fired up" not in text
    assert not dumps_in(tmp_path)
    assert not boxes(tmp_path)


def test_an_engine_is_refused_in_contain_if_its_backend_was_never_run_with_the_model(tmp_path):
    """Which backends there are is known only when all is loaded."""
    armed = {"G4DEBUG_TRACE": ALL, "G4DEBUG_MODE": "contain"}
    run = drive(tmp_path, str(DRIVER), *GEMMA_3_ON_FA3, **armed)
    assert run.status == 1, run.log[-3000:]
    line = refused(run.log)
    assert f"{SAID_OF_IT}MHATokenToKVPool) on fa3, no draft. {NEVER_RUN}such a model" in line
    assert "was run with no draft on trtllm_mha, triton, flashinfer; " in line
    assert "G4DEBUG_MODE=contain could harm a healthy server" in line
    assert not run.results
    assert not run.dumps


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"G4DEBUG_MODE": "log"}, id="log"),
        pytest.param({"G4DEBUG_MODE": "raise", "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"}, id="risk"),
        pytest.param(
            {"G4DEBUG_MODE": "raise", "G4DEBUG_TRACE": "flight-recorder"},
            id="record",
            marks=pytest.mark.long("a third engine"),
        ),
    ],
)
def test_each_way_that_the_refusal_names_starts_that_engine(way, tmp_path):
    run = drive(tmp_path, str(DRIVER), *GEMMA_3_ON_FA3, **{"G4DEBUG_TRACE": ALL} | way)
    assert run.status == 0, run.log[-3000:]
    assert NEVER_RUN not in run.log
    assert run.log.count(SAID_OF_IT) == 1
    assert len(run.results) == 2
    assert not run.dumps
    limits = told_status.limits(told_status.read(run.log))
    judges = {*way.get("G4DEBUG_TRACE", ALL).split(",")} - {"flight-recorder"}
    assert {name for name, said in limits.items() if "it may be wrong" in said} == judges
