"""One rank of two stops with a finding: the other leaves its dump, and the server ends soon."""

from __future__ import annotations

import contextlib
import os
import re
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from real_engine import ENGINE, dumps_in, in_session, started

from g4debug import cli
from g4debug.dumps import incidents

pytestmark = [*ENGINE, pytest.mark.once("what it tests is the same code on every release")]
DRIVER = str(Path(__file__).parents[2] / "cpu" / "drive_tensor_parallel.py")
SECONDS = 5.0  # from the finding to the last process gone


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """``(folder, log, seconds, what is left)`` of a server after its rank 1 found a bad page."""
    folder = tmp_path_factory.mktemp("stopped")
    fault = "seed=1;page-oob=1*on@mode=target_verify@rank=1"
    environ = {"SGLANG_TRTLLM_MHA_DEBUG": "1", "G4DEBUG_FAULTS": fault}
    used: set[str] = set()
    with started(folder, DRIVER, "mtp", "2", **environ) as (process, log):
        while process.poll() is None and time.time() - log.stat().st_mtime < 300:
            used |= shared(process.pid)
            time.sleep(0.2)
        while (left := in_session(process.pid)) and time.time() - log.stat().st_mtime < SECONDS:
            time.sleep(0.02)
        gone = time.time()
    text = log.read_text(errors="replace")
    assert (folder / "dumps").is_dir(), text[-3000:]
    (incident,) = incidents.group(incidents.look_into(folder / "dumps"))
    seconds = gone - datetime.fromisoformat(incident.first.time).timestamp()
    assert used
    return folder, text, seconds, left, used & set(os.listdir("/dev/shm")), incident


def shared(pid: int) -> set[str]:
    """What a process and its children have mapped from /dev/shm."""
    found: set[str] = set()
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{one.pid}/maps").read_text()
                found |= set(re.findall(r" /dev/shm/(\S+)$", text, re.M))
    return found


def test_every_rank_leaves_a_dump_and_the_finding_is_the_first(stopped):
    folder, text, *_, incident = stopped
    found = [(d.head.rank, d.head.check, d.head.kind) for d in incident.dumps]
    assert found == [
        (1, "page-table", "out-of-range"),
        (0, "flight-recorder", "other-rank"),
    ], text[-3000:]
    other = next(r for r in dumps_in(folder) if r.finding.kind == "other-rank")
    assert "rank dp0/tp1/pp0 stopped the server: page-table in target" in other.finding.headline
    assert other.finding.got.startswith("this rank found nothing")
    assert str(incident.first.path) in other.finding.cause
    assert other.steps
    assert other.allocator


def test_the_server_ends_soon_and_leaves_nothing(stopped):
    _, text, seconds, left, shm, _ = stopped
    assert seconds < SECONDS, text[-3000:]
    assert not left
    assert not shm
    assert "py-spy" not in text
    assert "Sleeping 5 seconds" not in text


def test_the_other_rank_does_not_bury_the_finding(stopped):
    """Its collective fails because the first one is gone; that is no finding of its own."""
    _, text, *_ = stopped
    assert len(re.findall(r"^.*g4debug: flight-recorder", text, re.M)) == 1
    assert len(re.findall(r"Scheduler hit an exception", text)) <= 2


def test_list_and_show_tell_one_incident(stopped, capsys):
    folder, *_ = stopped
    assert cli.main(["list", str(folder / "dumps"), "--width", "120"]) == 0
    listed = capsys.readouterr().out
    assert "incident: 2 dumps of 2 processes on 1 host" in listed
    assert "found nothing itself; saved because another rank had stopped" in listed
    assert cli.main(["show", str(folder / "dumps"), "--width", "160"]) == 0
    shown = capsys.readouterr().out
    assert "first: " in shown
    assert "tp1, pid " in shown.partition("first: ")[2][:60]
    assert "found nothing itself" in shown.partition("OTHERS")[2].partition("DIFFERS")[0]
    # What the ranks did until then was the same, and nothing else is claimed.
    assert " of step " not in shown.partition("DIFFERS")[2].partition("\nCAUSE")[0]
