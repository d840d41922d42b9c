"""What befell another process, or another container of the pod, is not the server's."""

from __future__ import annotations

import pytest

from g4debug.triage import reading, verdict

pytestmark = pytest.mark.once("a log is read without SGLang")

UP = "[2026-11-20 02:13:40] The server is fired up and ready to roll!\n"
KILL = "Nov 20 02:40:11 node7 kernel: Out of memory: Killed process 812 ({}) total-vm:1\n"
XID = "Nov 20 02:40:11 node7 kernel: NVRM: Xid (PCI:0000:86:00): 31, pid=5120, name={}, Ch 8\n"
TASK = "Nov 20 02:40:11 node7 kernel: oom-kill:constraint=CONSTRAINT_MEMCG,task={},pid=812,uid=0\n"


def of(log: str) -> verdict.Verdict:
    return verdict.of(reading.of(line.encode() + b"\n" for line in log.splitlines()))


@pytest.mark.parametrize("text", [KILL, XID, TASK])
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("sglang::schedul", True),
        ("python3", True),
        ("pt_main_thread", True),
        ("ray::SGLangEngi", True),
        ("node_exporter", False),
        ("java", False),
        ("ffmpeg", False),
    ],
)
def test_the_kernel_names_a_process(text: str, name: str, ours: bool) -> None:
    found = of(UP + text.format(name))
    assert (found.state == "entry") is ours
    assert [mark.line for mark in found.neighbours] == ([] if ours else [2])


def test_a_gpu_that_has_failed_fails_for_all() -> None:
    assert of(UP + XID.format("ffmpeg").replace(": 31,", ": 79,")).state == "elsewhere"


POD = """Containers:
  istio-proxy:
    Image:          docker.io/istio/proxyv2:1.20
    Last State:     Terminated
      Reason:       {}
  server:
    Image:          {}
    Last State:     Terminated
      Reason:       {}
Events:             <none>
"""


@pytest.mark.parametrize(
    ("log", "image", "sidecar", "server", "entry"),
    [
        ("", "lmsysorg/sglang:v0.5.23", "OOMKilled", "Error", 0),
        ("", "lmsysorg/sglang:v0.5.23", "Error", "OOMKilled", 26),
        ("", "registry/llm:7", "OOMKilled", "Error", 0),
        (f"[pod/llm-0/server] {UP}", "registry/llm:7", "OOMKilled", "Error", 0),
        (f"[pod/llm-0/server] {UP}", "registry/llm:7", "Error", "OOMKilled", 26),
    ],
)
def test_a_pod_has_several_containers(log, image, sidecar, server, entry) -> None:
    found = of(log + POD.format(sidecar, image, server))
    assert (found.entry.number if found.entry else 0) == entry
    assert len(found.neighbours) == (0 if entry else 1)


def test_one_container_is_the_servers() -> None:
    found = of("Containers:\n  llm:\n    Last State:   Terminated\n      Reason:  OOMKilled\n")
    assert found.entry is not None
    assert found.entry.number == 26


def test_another_service_of_compose() -> None:
    assert of(f"server-1  | {UP}redis-1 exited with code 137\n").state == "nothing"
    assert of(f"server-1  | {UP}server-1 exited with code 137\n").entry is not None


ANSWER = '[2026-11-20 {}] INFO:     10.0.0.1:5000 - "{} HTTP/1.1" 200 OK\n'


@pytest.mark.parametrize(
    ("text", "asked", "at", "lives"),
    [
        (KILL.format("python3"), "GET /health", "03:10:00", True),
        (KILL.format("python3"), "GET /health", "02:40:20", False),
        (XID.format("python3"), "GET /health", "03:10:00", False),  # the main process answers it
        (XID.format("python3"), "POST /generate", "03:10:00", True),
        (XID.format("python3"), "POST /v1/chat/completions", "03:10:00", True),
        (XID.format("python3"), "GET /health_generate", "03:10:00", True),
        (XID.format("python3"), "POST /generate", "02:40:40", False),
    ],
)
def test_an_idle_server_that_answers_is_alive(text, asked, at, lives) -> None:
    assert (of(UP + text + ANSWER.format(at, asked)).state == "nothing") is lives


def test_a_hang_is_not_survived_by_an_answer() -> None:
    hang = "[2026-11-20 02:40:00 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300.0, x)\n"
    assert of(UP + hang + ANSWER.format("03:10:00", "POST /generate")).state == "entry"


def test_sglang_kills_itself_when_a_child_has_failed() -> None:
    end = (
        "[2026-11-20 02:40:12] Received sigquit from a child process. It usually means x\nKilled\n"
    )
    assert of(UP + end).state == "unknown"
    assert of(UP + "Killed\n").entry is not None
