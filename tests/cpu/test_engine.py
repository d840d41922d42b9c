"""Real SGLang on the CPU: engine and server, start to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import installed_plugin
import pytest
from real_engine import ENGINE, NOHUP, TERMINAL, WhenAsked, drive, in_session
from warm import signals

from g4debug.cpu.server import free_port

pytestmark = ENGINE
HERE = Path(__file__).parent


def staged(mode: str, folder: Path) -> tuple[dict[str, dict], str, dict[str, dict]]:
    """Run drive_engine.py; returns its result lines by stage, all that it printed, and what each
    of its processes was like."""
    flags = folder / "flags"
    flags.mkdir(parents=True)
    installed_plugin.install(folder, "meddler", "meddler:register")
    environ = {
        "PYTHONPATH": installed_plugin.path(folder, HERE),
        "MEDDLER_FLAGS": str(flags),
    }
    command = (str(HERE / "drive_engine.py"), mode)
    run = drive(folder, *command, seconds=600, cold=mode == "plain", **environ)
    processes = {p.stem: json.loads(p.read_text()) for p in flags.glob("*.json")}
    return {line["stage"]: line for line in run.results}, run.log, processes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return WhenAsked(
        mtp=lambda: staged("mtp", folder / "mtp"), plain=lambda: staged("plain", folder / "plain")
    )


@pytest.fixture
def mtp(runs):
    return runs["mtp"]


@pytest.mark.once("how a process is forked does not depend on the release")
def test_a_warm_process_is_what_a_cold_one_is(mtp, runs):
    """When SGLang loads its plugins. ``mtp`` was forked with its imports, ``plain`` was not."""
    warm, cold = mtp[2], runs["plain"][2]
    both = ("MainProcess", "Process-1")  # and the scheduler
    assert set(both) <= set(cold)  # 0.5.23's detokenizer loads plugins, too
    for name in both:
        process = cold[name]
        assert "sglang.srt.managers.scheduler" in process["modules"]
        assert warm[name] == process


def test_mtp_drafts_are_accepted_and_reproducible(mtp):
    results, text, _ = mtp
    assert "first" in results, text[-3000:]
    assert "stand-ins for CUDA kernels in force" in text
    assert results["first"]["accept_length"] > 1.8
    assert results["again"] == {**results["first"], "stage": "again"}
    tokens = results["first"]["tokens"]
    assert len({tuple(t) for t in tokens}) == len(tokens)
    for t in tokens:
        assert len(t) == 48
        assert len(set(t)) > 24
        assert min(t) > 3


def test_outputs_with_and_without_mtp_are_equal(mtp, runs):
    results, text, _ = runs["plain"]
    assert "first" in results, text[-3000:]
    assert results["first"]["tokens"] == mtp[0]["first"]["tokens"]


def test_a_draft_on_wrong_pages_is_rejected_more_often(mtp):
    results, text, _ = mtp
    assert "wrong-draft" in results, text[-6000:]
    assert results["wrong-draft"]["tokens"] == results["first"]["tokens"]
    assert results["wrong-draft"]["accept_length"] < 0.9 * results["first"]["accept_length"]


def test_a_page_out_of_range_kills_the_engine_far_from_the_cause(mtp):
    results, text, _ = mtp
    assert "out-of-range" not in results
    assert "AcceleratorError: CUDA error: an illegal memory access was encountered" in text
    assert "(g4debug: raised by the CPU engine's stand-in" in text
    traceback = text[text.index("Traceback") : text.index("AcceleratorError")]
    assert "trtllm_mha_backend" not in traceback
    assert "paged_attention" not in traceback


def test_server_answers_over_http(tmp_path, monkeypatch):
    """Started beside a folder that is called like the package, as in the parent of a clone, and
    with a port that opens late: neither leaves a traceback in its log. Nor does its end (SIGTERM)
    leave triton's list of what was not freed."""
    from cpu_server import serving

    (tmp_path / "g4debug").mkdir()
    monkeypatch.chdir(tmp_path)
    installed_plugin.install(tmp_path, "late-port", "late_port:register")
    environ = {"PYTHONPATH": installed_plugin.path(tmp_path, HERE)}
    log = tmp_path / "server.log"

    def post(url, body):
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    flags = ["--log-level", "warning"]
    with serving(flags, log=log, timeout=300, extra_environment=environ) as url:
        native = post(
            f"{url}/generate",
            {
                "text": "w10 w20 w30",
                "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
            },
        )
        openai = post(
            f"{url}/v1/completions",
            {"model": "g4debug-tiny", "prompt": "w10 w20 w30", "max_tokens": 12, "temperature": 0},
        )
        said = log.read_text()
    assert "Traceback" not in said
    assert native["meta_info"]["completion_tokens"] == 12
    assert native["meta_info"]["spec_verify_ct"] < 12
    assert openai["choices"][0]["text"].split() == native["text"].split()
    assert "leaked" not in log.read_text()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=5)


MORE = pytest.mark.long("a server of its own for each moment and way to end it")


@pytest.mark.once("the processes that are ended are started by g4debug's own code")
@pytest.mark.parametrize(
    ("when", "ignored"),
    [
        pytest.param("serving", TERMINAL, id="serving-terminal"),
        pytest.param("starting", NOHUP, id="starting-nohup", marks=MORE),
        *(
            pytest.param(when, which, id=f"{when}-{name}", marks=MORE)
            for when, name, which in (
                ("importing", "terminal", TERMINAL),
                ("importing", "nohup", NOHUP),
                ("starting", "terminal", TERMINAL),
                ("serving", "nohup", NOHUP),
            )
        ),
    ],
)
def test_a_server_that_is_told_to_end_leaves_nothing(tmp_path, when, ignored):
    """SIGTERM to `g4debug cpu-server`, as `kill`, a service manager and CI send it."""
    log, port = tmp_path / "log", free_port()
    command = [sys.executable, "-m", "g4debug", "cpu-server", "--port", str(port)]
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [*signals(*ignored), *command], stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        end = time.monotonic() + 300
        while not _is(when, server.pid, port):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.05)
        if signal.SIGHUP in ignored:  # SGLang and uvicorn handle the others themselves
            server.send_signal(signal.SIGHUP)
            assert _is(when, server.pid, port)
        server.send_signal(signal.SIGTERM)
        assert server.wait(300) != -signal.SIGHUP
        end = time.monotonic() + 60
        while left := in_session(server.pid):
            assert time.monotonic() < end, left
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _is(when: str, pid: int, port: int) -> bool:
    if when == "importing":  # the scheduler and the detokenizer, before they ask to end with it
        return sum("--multiprocessing-fork" in name for name in in_session(pid)) == 2
    if when == "starting":
        return any("sglang::scheduler" in name for name in in_session(pid))
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60).status == 200
    return False
