"""The kernels of the three guards compile for a GPU, on a machine that has none.

What they need there is limited, too: a kernel that spills registers to memory, or that needs many
of them for each thread, costs every forward more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once("Triton is the same with all releases, and the kernels are ours")

ROOT = Path(__file__).resolve().parents[2]
COMPILE = """
import os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from g4debug.tracers.kv_writes.kernels import _write_kernel
from g4debug.tracers.page_table.guard import _page_guard_kernel
from g4debug.tracers.page_table.token_guard import _token_guard_kernel

WIDE = (
    "claims total acks host req_pool_indices mask_starts step number stamps loc firsts owners "
    "protected"
)
NARROW = "table indptr splits offsets kept req_to_token book seq_lens cu_q starts corrects"
TYPES = dict.fromkeys(WIDE.split(), "*i64") | dict.fromkeys(f"{NARROW} counts".split(), "*i32")
MORE = {
    "_page_guard_kernel": {"out": "*i32"},
    "_token_guard_kernel": {"indices": "*i64", "lengths": "*i32"},
    "_write_kernel": {"out": "*i64"},
}
TOOL = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
for kernel in (_page_guard_kernel, _token_guard_kernel, _write_kernel):
    types = TYPES | MORE[kernel.fn.__name__]
    for swa, watch in ((False, False), (True, False), (False, True), (True, True)):
        given = dict(
            HAS_Q=True, HAS_SPLITS=not swa, HAS_OFFSETS=swa, HAS_MASK=swa, HAS_ROWS=True,
            RAGGED=swa, HAS_TRUTH=True, BY_PAGE=swa, HAS_SHADOW=True, HAS_OWNERS=True,
            HAS_STEP=swa, SWA=swa, REPAIR=-1 if watch else 1 + swa, FENCE=True, ROWS=64,
            SWITCHED=watch,
        )
        const = {p.name: given.get(p.name, p.default) for p in kernel.params if p.is_constexpr}
        sign = {n: "constexpr" if n in const else types.get(n, "i32") for n in kernel.arg_names}
        made = triton.compile(
            ASTSource(fn=kernel, signature=sign, constexprs=const),
            target=GPUTarget("cuda", 90, 32), options={"num_warps": 4},
        )
        print("COMPILED", kernel.fn.__name__)
        if os.path.exists(TOOL):
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(made.asm["cubin"])
                file.flush()
                used = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True)
            text = (used.stdout + used.stderr).decode()
            print("NEEDS", *re.search(r"REG:(\\d+) STACK:(\\d+)", text).groups())
"""


def test_they_compile_for_sm90_and_spill_nothing(tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env={**env, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.count("COMPILED") == 12, done.stderr[-3000:]
    needs = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("NEEDS")]
    assert all(int(registers) <= 128 and int(stack) == 0 for registers, stack in needs), needs
