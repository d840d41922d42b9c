"""On a GPU, the flight recorder alone: a crash leaves a dump, and what its CUDA core dump says.

Nobody was armed who checks anything. The CUDA driver is told by the flight recorder itself to write
a core dump, and its autopsy is in the dump within SECONDS of the crash.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import installed_plugin
import pytest
import test_prefill_gpu
import torch
from named_pages import agrees
from test_engine_replay import run_engine
from test_rank_divergence_gpu import ENGINE, models, serve

from g4debug.dumps import reading
from g4debug.findings import black_box
from g4debug.findings.record import TrapRecord

__all__ = ["models"]  # the fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HERE = Path(__file__).parent
SECONDS = 30
ALONE = {"G4DEBUG_TRACE": "flight-recorder", "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"}
E4B = "workloads.e4b_trtllm_mtp"


class Case(NamedTuple):
    """A workload, and a fault that is fatal because what it writes lies far behind its pool.

    written_over: the registers of this kernel may hold something else by the time it stops. Only
    then the autopsy may name no page.
    """

    workload: str
    fault: str
    written_over: bool = False


CASES = {
    "a page table, in graph replay": Case(f"{E4B}:ON_A_GPU", "page-oob=1*on@mode=replay"),
    # In the second prefill: kernels may be compiled in the first, for two minutes. The kernel gives
    # its addresses to the copy engine.
    "a page table, in a prefill": Case(
        f"{E4B}:ONE_BACKEND", "page-oob=1*on@mode=extend@step=2", written_over=True
    ),
    # Which registers a warp has left when it stops is chance: of these three the page was named in
    # some runs on a H200 with 0.5.23, and only the row and the buffer in others.
    "a list of tokens": Case(f"{E4B}:TRITON", "token-oob=1*on", written_over=True),
    "a page table, without CUDA graphs": Case(
        f"{E4B}:EAGER", "page-oob=1*on@mode=decode", written_over=True
    ),
    "a list of tokens, without CUDA graphs": Case(
        f"{E4B}:EAGER", "token-oob=1*on@mode=target_verify", written_over=True
    ),
    "a server that fills its GPU": Case(f"{E4B}:FULL", "page-oob=1*on@mode=replay"),
}


def crashed(folder: Path, workload: str = E4B, **environ: str) -> tuple[TrapRecord, str, float]:
    """The only dump, the log, and the seconds from the last step to the rewritten dump."""
    status, log, dumps = run_engine(folder, workload, **{**ALONE, **environ})
    assert status != 0, log[-3000:]
    assert len(dumps) == 1, log[-5000:]
    record = reading.read(dumps[0])
    assert record.steps, log[-8000:]
    took = dumps[0].stat().st_mtime - record.steps[-1].time_ns / 1e9
    return record, log, took


def cores(folder: Path) -> list[Path]:
    return sorted((folder / "dumps").glob("g4debug-core-*"))


@pytest.mark.parametrize("name", CASES)
def test_a_bad_page_is_named_from_the_core_dump(name: str, tmp_path: Path) -> None:
    workload, fault, written_over = CASES[name]
    if workload.endswith("ONE_BACKEND") and not test_prefill_gpu.on_sm90():
        pytest.skip("this SGLang has no trtllm_mha prefill on sm90")
    record, log, took = crashed(tmp_path, workload, G4DEBUG_FAULTS=f"seed=3;{fault}")
    assert f"{fault.partition('=')[0]} #1" in log
    # The process may die in C++ before Python sees the error; then the black box leaves the dump.
    assert record.finding.kind in ("cuda-error", "native-crash"), log[-5000:]
    assert record.environment["CUDA_COREDUMP_GENERATION_FLAGS"].endswith("skip_abort")
    assert took < SECONDS
    print(name, record.finding.kind, f"{took:.1f} s", record.autopsy)
    assert record.autopsy is not None, log[-5000:]
    assert "illegal address" in record.autopsy.exception.lower()
    assert record.autopsy.kernel
    agrees(record, log, written_over=written_over)
    assert record.memory is not None
    assert record.memory.segments  # a dead device can still be asked for them
    assert "the CUDA core dump says: " in log
    assert cores(tmp_path) == []  # its autopsy is in the dump


def test_an_embedding(tmp_path: Path) -> None:
    """It is an assertion of PyTorch's: no page is accused."""
    installed_plugin.install(tmp_path / "site", "wrong", "wrong_ids:register")
    path = installed_plugin.path(tmp_path / "site", HERE)
    record, log, took = crashed(tmp_path, PYTHONPATH=path, WRONG_AT="4")
    assert record.finding.kind in ("device-assert", "cuda-error")
    print(f"{took:.1f} s", record.autopsy)
    assert record.autopsy is not None, log[-5000:]
    assert record.autopsy.page == -1
    assert took < SECONDS


@pytest.mark.parametrize("workload", [E4B, f"{E4B}:EAGER"], ids=["graphs", "eager"])
def test_a_kernel_of_somebody_elses(workload: str, tmp_path: Path) -> None:
    """It is named, and no page is accused: innocence is worth as much."""
    installed_plugin.install(tmp_path / "site", "foreign", "foreign_kernel:register")
    path = installed_plugin.path(tmp_path / "site", HERE)
    record, log, took = crashed(tmp_path, workload, PYTHONPATH=path, FOREIGN_AT="6")
    assert record.finding.kind == "cuda-error"
    print(f"{took:.1f} s", record.autopsy)
    assert record.autopsy is not None, log[-5000:]
    assert record.autopsy.kernel == "foreign_scatter"
    assert record.autopsy.page == record.autopsy.row == -1
    assert took < SECONDS


@pytest.mark.parametrize("mode", ["keep", "off"])
def test_the_file_stays_or_is_never_written(mode: str, tmp_path: Path) -> None:
    fault = CASES["a page table, in graph replay"].fault
    record, log, _ = crashed(tmp_path, G4DEBUG_FAULTS=f"seed=3;{fault}", G4DEBUG_CORE=mode)
    assert (record.autopsy is not None) == (mode == "keep"), log[-3000:]
    found = cores(tmp_path)
    assert len(found) == (1 if mode == "keep" else 0)
    for core in found:
        print(f"{core.stat().st_size:,} bytes")
        assert core.stat().st_size < 2 << 30


def test_sglangs_own_switch_leaves_the_black_box(tmp_path: Path) -> None:
    """The driver aborts the process behind the core dump, so Python never sees the error."""
    fault = CASES["a page table, in graph replay"].fault
    record, log, _ = crashed(
        tmp_path,
        G4DEBUG_FAULTS=f"seed=3;{fault}",
        SGLANG_CUDA_COREDUMP="1",
        SGLANG_CUDA_COREDUMP_DIR=str(tmp_path / "theirs"),
    )
    assert record.finding.kind == "native-crash"
    assert "SIGABRT" in record.finding.headline
    assert "a CUDA error leaves no exception, and only the dump of the black box" in log
    assert record.steps
    assert record.autopsy is not None, log[-3000:]
    assert list((tmp_path / "theirs").iterdir())  # it is theirs, so it stays


def test_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    """With a CUDA context, which takes seconds to go."""
    killer = subprocess.Popen(
        ["python3", "-c", KILLER, str(tmp_path / "dumps"), str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        record, _, _ = crashed(tmp_path)
    finally:
        killer.terminate()
    assert record.finding.kind == "killed"
    found = re.search(r"by the server's main process \(pid \d+\)", record.finding.got)
    assert found, record.finding.got
    assert time.time() - record.steps[-1].time_ns / 1e9 < 300
    assert [p for p in black_box.paths() if str(tmp_path).encode() in p.read_bytes()[:4096]] == []


# Kills the scheduler whose box names this dump folder, three seconds after its first step.
KILLER = f"""
import os, struct, sys, time
folder = sys.argv[1].encode()
while True:
    for name in os.listdir("/dev/shm"):
        if name.startswith({black_box.PREFIX!r}):
            data = open("/dev/shm/" + name, "rb").read()
            at = {black_box._STEPS_AT} + {black_box.STEP_BYTES}
            if folder in data[:4096] and struct.unpack_from("<q", data, at)[0]:
                os.kill(struct.unpack_from("<q", data, 16)[0], {int(signal.SIGKILL)})
                sys.exit()
    time.sleep(0.1)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_rank_of_two(tmp_path: Path, models: None) -> None:
    """Rank 1 reads a page that is not there: its own core dump tells it, and no other rank's."""
    fault = "seed=3;page-oob=1*on@mode=replay@rank=1"
    # Other servers may have memory on one of the two GPUs, and SGLang refuses to start where they
    # differ.
    shared = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    status, log, dumps = serve(tmp_path, ENGINE, 400, **ALONE, **shared, G4DEBUG_FAULTS=fault)
    assert status != 0, log[-3000:]
    assert "page-oob #1" in log, log[-8000:]
    records = [reading.read(path) for path in dumps]
    crashed = [r for r in records if r.finding.location.rank == 1]
    print([(r.finding.location.rank, r.finding.headline, r.autopsy) for r in records])
    assert crashed, log[-5000:]
    told = [r for r in crashed if r.autopsy is not None]
    assert told, log[-5000:]
    agrees(told[0], log)
    for record in records:
        other = record.finding.location.rank == 0 and record.autopsy is not None
        assert not other or record.autopsy.page == -1, record.autopsy
