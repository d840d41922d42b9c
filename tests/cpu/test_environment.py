"""The environment, the strict packages of site/, and the command lines: no SGLang needed."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from g4debug import cpu
from g4debug.cpu import server
from g4debug.cpu.toys.gemma_4 import TOY

python = [sys.executable, "-m", "g4debug.cpu"]
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA")


def run(*arguments, **environment):
    done = subprocess.run(
        [*python, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout.strip(), done.stderr


def test_environment_leads_the_path_and_keeps_what_is_the_users():
    base = {"PYTHONPATH": f"/mine{os.pathsep}{cpu.SITE}", "OMP_NUM_THREADS": "7", "HOME": "/h"}
    made = cpu.environment(base)
    assert made["PYTHONPATH"] == f"{cpu.SITE}{os.pathsep}/mine"
    assert (made["OMP_NUM_THREADS"], made["HOME"]) == ("7", "/h")
    assert made["G4DEBUG_CPU"] == made["TRITON_INTERPRET"] == made["SGLANG_USE_CPU_ENGINE"] == "1"
    assert cpu.environment({"TRITON_INTERPRET": "0"})["TRITON_INTERPRET"] == "1"
    assert cpu.environment(made) == made


def test_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    for call in (cpu.prepare, cpu.activate):
        with pytest.raises(cpu.CpuEngineError, match=r"H200.*only for machines without one"):
            call()


def test_activate_outside_the_environment_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(cpu.CpuEngineError, match=r"python -m g4debug\.cpu"):
        cpu.activate()


@no_cuda
def test_prepare_too_late_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", os)
    monkeypatch.delenv("G4DEBUG_CPU", raising=False)
    with pytest.raises(cpu.CpuEngineError, match="too late"):
        cpu.prepare()


@no_cuda
def test_sgl_kernel_is_strict_and_torchvision_imports():
    code = (
        "import sgl_kernel, sgl_kernel.kvcacheio as k\n"
        "for call in (lambda: sgl_kernel.rmsnorm, k.transfer_kv_direct):\n"
        "    try: call()\n"
        "    except (AttributeError, NotImplementedError) as e: print(e)\n"
        "try: import torchvision; print('imported')\n"
        "except ModuleNotFoundError: print('imported')\n"
    )
    status, out, err = run("-c", code)
    assert status == 0, err
    first, second, third = out.splitlines()
    assert first.startswith("sgl_kernel.rmsnorm is a kernel of a wheel for CUDA")
    assert second.startswith("sgl_kernel.kvcacheio.transfer_kv_direct needs CUDA")
    assert third == "imported"


@no_cuda
def test_the_users_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'here'")
    status, out, err = run("-c", "print(mine)", PYTHONPATH=str(tmp_path))
    assert (status, out) == (0, "here"), err


@no_cuda
def test_the_file_of_another_checkout_does_not_run_this_one_again(tmp_path):
    """Each runs what it hides: they would call each other for ever."""
    other = tmp_path / "site"
    shutil.copytree(cpu.SITE, other, ignore=shutil.ignore_patterns("__pycache__"))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import builtins; builtins.mine = 'here'")
    paths = os.pathsep.join([str(other), str(cpu.SITE), str(mine)])
    status, out, err = run("-c", "print(mine)", PYTHONPATH=paths)
    assert (status, out) == (0, "here"), err
    assert "RecursionError" not in err


@no_cuda
@pytest.mark.parametrize("parent", ["there", "gone"])
def test_a_spawned_process_whose_parent_was_gone_before_it_began_ends(parent):
    read, write = os.pipe()  # multiprocessing's parent holds the other end as long as it lives
    if parent == "gone":
        os.close(write)
    code = (f"print('began') # pipe_handle={read}", "--multiprocessing-fork")
    done = subprocess.run(
        [sys.executable, "-c", *code],
        env=cpu.environment(os.environ),
        pass_fds=[read],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    expected = (0, "began\n") if parent == "there" else (-signal.SIGKILL, "")
    assert (done.returncode, done.stdout) == expected, done.stderr


@no_cuda
def test_a_process_in_which_sglang_froze_the_collector_ends_quietly():
    """SGLang does it in each process of a server that is up, and never undoes it."""
    pytest.importorskip("triton")
    code, out, said = run("-c", "import gc, triton.language; gc.freeze(); print('end')")
    assert (code, out) == (0, "end")
    assert said == ""


def test_the_users_flags_win(monkeypatch, tmp_path):
    toy = dataclasses.replace(TOY, models=lambda: (tmp_path / "t", tmp_path / "a"))
    monkeypatch.setattr(server.toys, "load", lambda name: toy)
    line = server.command(["--page-size", "32", "--max-total-tokens=99"])
    assert line[1:3] == ["-m", "sglang.launch_server"]
    assert line.count("--page-size") == 1
    assert "--max-total-tokens" not in line
    assert line[line.index("--speculative-algorithm") + 1] == "NEXTN"
    assert "--disable-cuda-graph" in line
    assert "--speculative-algorithm" not in server.command(mtp=False)
    other = server.command(["--model-path", "/m"])
    assert "--speculative-algorithm" not in other
    assert other.count("--model-path") == 1


def test_engine_arguments_take_overrides(monkeypatch, tmp_path):
    toy = dataclasses.replace(TOY, models=lambda: (tmp_path / "t", tmp_path / "a"))
    monkeypatch.setattr(server.toys, "load", lambda name: toy)
    made = server.engine_arguments(page_size=32, context_length=None)
    assert made["page_size"] == 32
    assert "context_length" not in made
    assert made["speculative_draft_model_path"] == str(tmp_path / "a")
    assert "speculative_algorithm" not in server.engine_arguments(mtp=False)


@pytest.mark.skipif(sys.platform != "linux", reason="abstract addresses are Linux's")
def test_two_processes_never_choose_the_same_port(monkeypatch):
    """Of two engines that start at once neither listens yet when the other one chooses."""
    monkeypatch.setattr(server, "PORTS", range(server.PORTS.start, server.PORTS.start + 200))
    code = (
        "import sys; from g4debug.cpu import server\n"
        f"server.PORTS = {server.PORTS!r}\n"
        "print(server.free_port(), flush=True); sys.stdin.read()"
    )
    ours = {server.free_port() for _ in range(60)}
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    theirs = {int(process.stdout.readline()) for process in others}
    for process in others:
        process.communicate(timeout=300)
    assert len(ours) == 60
    assert len(ours | theirs) == 63
