"""What is packed for a GPU host without a network: only sm90's code, and two stand-ins."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parents[2] / "benchmarks" / "offline_host"
pytestmark = pytest.mark.once("it does not import SGLang")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(kind: int, capability: int, code: bytes, header: int = 64) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, header, len(code)) + bytes(12)
    return (head + struct.pack("<I", capability)).ljust(header, b"\0") + code


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_the_code_of_other_chips_is_zeros_and_all_else_stays(tmp_path):
    begin, end = b"\x7fELF" + b"a" * 99, b"z" * 77
    old, mine, ptx, new = b"o" * 40, b"m" * 56, b"p" * 24, b"n" * 32
    parts = [entry(2, 80, old), entry(2, 90, mine), entry(1, 90, ptx), entry(2, 120, new)]
    # What only looks like a header: its size goes beyond the file.
    looks = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40)
    before = begin + fat(*parts) + looks + end
    path = tmp_path / "lib.so"
    path.write_bytes(before)
    assert load("pack").thin(path) == {80: 40, 90: 80, 120: 32}
    after = path.read_bytes()
    assert after == before.replace(old, bytes(40)).replace(new, bytes(32))
    assert mine in after
    assert ptx in after


def test_a_library_without_gpu_code_is_left_alone(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(b"\x7fELF" + b"x" * 100)
    assert not load("pack").thin(path)
    assert path.read_bytes() == b"\x7fELF" + b"x" * 100


def test_cutlass_can_be_imported_and_used_as_flashinfer_does():
    program = """
import cutlass, cutlass.cute as cute
from cutlass.base_dsl import Whatever
assert cute.jit(len) is len
assert not cutlass.CUDA_VERSION.major > 13
cute.Tensor.__getitem__ = 3
assert callable(cute.Tensor.__getitem__) and not hasattr(cute, "__wrapped__")
assert Whatever.__extract_mlir_values__ and (Whatever | None)
class Kernel(Whatever[int]): pass
Kernel().run(1, 2)
"""
    run = [sys.executable, "-c", f"import sitecustomize as s; assert s.Finder\n{program}"]
    done = subprocess.run(
        run, env={"PYTHONPATH": str(HERE), "PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_function_aborts_with_its_name():
    code = load("stub_symbols").source(["ncclCommGrow"])
    assert "int ncclCommGrow(void) {" in code
    assert "ncclCommGrow is not in this host's libraries" in code


def test_sglang_finds_the_clones_plugin_where_it_is_registered(tmp_path):
    script = str(HERE / "register.py")
    done = subprocess.run([sys.executable, script, str(tmp_path)], check=False)
    assert done.returncode == 0
    ask = "import importlib.metadata as m; print(m.entry_points(group='sglang.srt.plugins'))"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = sys.argv[1:]; {ask}"]
    told = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "g4debug.plugin:register" in told.stdout


def test_a_folder_without_it_is_told(monkeypatch, tmp_path, capsys):
    register = load("register")
    monkeypatch.setattr(register, "write", lambda folder: folder)
    monkeypatch.setattr(sys, "argv", ["register.py", str(tmp_path)])
    assert register.main() == 1
    assert f"got no plugin g4debug in {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["begin.sh", "collect.sh", "unpack.sh"])
def test_the_shell_scripts_can_be_read(script):
    subprocess.run(["bash", "-n", str(HERE / script)], check=True)


def test_nothing_begins_where_g4debug_would_not_be_found(tmp_path):
    """A target that is there already, and whose Python path has no SGLang."""
    target, out = tmp_path / "target", tmp_path / "out"
    target.mkdir()
    (target / "env.sh").write_text("export PYTHONNOUSERSITE=1\n")
    command = ["bash", str(HERE / "begin.sh"), "-", str(target), "jobs", str(out), "5"]
    there = tmp_path / "bin"
    there.mkdir()
    python = there / "python3"
    python.write_text(f'#!/bin/sh\n[ "$1" = - ] && set -- -S -\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    path = f"{there}:/usr/bin:/bin"
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "No module named 'sglang'" in done.stderr
    assert not (out / "queue.out").exists()
