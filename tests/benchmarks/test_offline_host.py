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
