"""The queue of GPU jobs: who gets which GPU, what is cut, what is left out the next time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_queue.py"
pytestmark = pytest.mark.once("it does not import SGLang")


def run(tmp_path: Path, jobs: str, *more: str) -> tuple[int, str]:
    (tmp_path / "jobs").write_text(jobs)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "jobs"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--gpus", "2", *more], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_jobs_get_gpus_logs_and_a_table(tmp_path):
    jobs = (
        "# a comment\n"
        "one | 1 | 2 | echo on $CUDA_VISIBLE_DEVICES\n"
        "two | 1 | 2 | echo on $CUDA_VISIBLE_DEVICES\n"
        "both | 2 | 3 | echo on $CUDA_VISIBLE_DEVICES; exit 3\n"
    )
    status, text = run(tmp_path, jobs)
    assert status == 1
    logs = {n: (tmp_path / "out" / f"{n}.log").read_text().strip() for n in ("one", "two", "both")}
    assert {logs["one"], logs["two"]} <= {"on 0", "on 1"}
    assert logs["both"] == "on 0,1"
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("both")] == [
        ["both", "3"]
    ]
    assert run(tmp_path, jobs) == (0, "")  # all of them were done


def test_what_runs_at_the_limit_is_ended_with_all_its_children(tmp_path):
    jobs = (
        "long | 1 | 3 | setsid sleep 3579 & sleep 3579\nnext | 1 | 3 | true\nmore | 2 | 3 | true\n"
    )
    begin = time.monotonic()
    status, text = run(tmp_path, jobs, "--seconds", "3")
    assert status == 1
    assert time.monotonic() - begin < 60
    assert "cut" in text
    assert "not begun: more" in text
    left = [p for p in psutil.process_iter(["cmdline"]) if "3579" in (p.info["cmdline"] or [])]
    assert not left


def test_a_line_that_is_no_job_is_refused(tmp_path):
    status, text = run(tmp_path, "one | 1 | echo\n")
    assert status == 1
    assert "expected name | GPUs | share | command" in text


def test_a_job_that_no_gpu_has_room_for_is_refused(tmp_path):
    status, text = run(tmp_path, "one | 1 | 1 | true\nbig | 1 | 5 | true\n")
    assert status == 1
    assert "big takes 5 shares, and a GPU has 3: give --shares 5" in text
