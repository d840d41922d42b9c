"""Real device-side asserts: CUDA's own text is in the dump, and the lookup that it was is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import installed_plugin
import pytest
import torch

from g4debug.dumps import reading
from g4debug.findings.record import TrapRecord
from g4debug.tracers.flight_recorder import device_asserts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HERE = Path(__file__).parent
REPRO = HERE.parents[1] / "repro"
DRAFT = "the draft's token embedding"


def failed(how: str, folder: Path, to_file: bool = True) -> tuple[TrapRecord, str, str]:
    """The dump of a process in which an assertion fails, its stdout, and its stderr."""
    folder.mkdir(exist_ok=True)
    log = folder / "stderr"
    with log.open("wb") as sink:
        ran = subprocess.run(
            [sys.executable, str(HERE / "fail_an_assertion.py"), how, str(folder / "dumps")],
            stdout=subprocess.PIPE,
            stderr=sink if to_file else subprocess.PIPE,
            timeout=300,
            check=False,
        )
    errors = log.read_bytes() if to_file else ran.stderr
    out = ran.stdout.decode(errors="replace")
    (path,) = (folder / "dumps").glob("*.pt")
    return reading.read(path), out, errors.decode(errors="replace")


@pytest.mark.parametrize(
    ("how", "sort"),
    [
        ("embedding", "embedding"),
        ("embedding-small", "embedding"),
        ("embedding-narrow", "embedding"),
        ("graph", "embedding"),
        ("compiled", "embedding"),
        ("index", "index"),
        ("put", "index"),
        ("gather", "gather"),
        ("scatter", "gather"),
    ],
)
def test_what_cuda_printed_is_in_the_dump(how, sort, tmp_path):
    record, out, errors = failed(how, tmp_path)
    print(out, record.asserts, record.finding.headline)  # shown if something below fails
    assert record.finding.kind == "device-assert"
    assert record.asserts, errors[-2000:]
    first = record.asserts[0]
    assert first.expression
    # The driver may still be printing when the dump is written.
    assert 0 < first.count <= errors.count(f"Assertion `{first.expression}` failed")
    assert first.file.endswith((".cu", ".cuh", ".py")) or how == "compiled"
    assert first.line > 0 or how == "compiled"
    assert first.function or how == "compiled"
    assert first.block.count(",") == first.thread.count(",") == 2
    # No lookup of this sort is cleared by what the assertion says of itself.
    assert sort in device_asserts.sorts(first)
    if sort == "embedding":
        judged = {x.name: x for x in record.lookups}
        assert (judged[DRAFT].rows, judged[DRAFT].verdict) == (2048, "could")
        assert f"only {DRAFT} (" in record.finding.cause
    assert "THE TEXT WAS THERE WITH THE ERROR: True" in out


def test_a_pipe_keeps_the_text_and_the_dump_says_so(tmp_path):
    record, _, errors = failed("embedding", tmp_path, to_file=False)
    assert record.finding.kind == "device-assert"
    assert record.asserts == ()
    assert "because stderr is a pipe" in record.finding.got
    assert device_asserts.parse(errors)
    (judged,) = [x for x in record.lookups if x.verdict == "could"]
    assert judged.name == DRAFT


def test_a_real_server_whose_draft_has_half_of_its_table_names_it(tmp_path):
    """E4B's shape with FROZEN_KV_MTP and CUDA graphs, as it starts or in its first requests.

    Only the flight recorder is armed: spec-lifecycle would stop this server before the assert.
    """
    installed_plugin.install(tmp_path / "site", "half", "half_a_draft:register")
    log = tmp_path / "log"
    with log.open("wb") as sink:
        status = subprocess.run(
            [
                *(sys.executable, str(REPRO / "harness" / "child.py"), "harness.engine", "cuda"),
                str(tmp_path / "result.json"),
                json.dumps({"workload": "workloads.e4b_trtllm_mtp", "requests": 8}),
            ],
            env={
                **os.environ,
                "PYTHONPATH": installed_plugin.path(tmp_path / "site", HERE),
                "G4DEBUG_TRACE": "flight-recorder",
                "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(tmp_path / "dumps"),
            },
            stdout=sink,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        ).returncode
    assert status != 0
    text = log.read_text(errors="replace")
    dumps = [reading.read(path) for path in sorted((tmp_path / "dumps").glob("*.pt"))]
    record = next((r for r in dumps if r.finding.kind == "device-assert"), None)
    assert record is not None, text[-3000:]
    print(record.finding.headline, record.finding.got, record.finding.cause)
    assert record.asserts
    assert record.finding.cause.startswith(f"Of the lookups in LOOKUPS, only {DRAFT} (")
