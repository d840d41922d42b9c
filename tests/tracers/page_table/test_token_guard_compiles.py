"""The kernel of the token lists' guard compiles for a GPU, on a machine that has none."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest

COMPILE = """
import inspect, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from g4debug.tracers.page_table.token_guard import _token_guard_kernel as kernel

WIDE = "indices claims total acks host req_pool_indices mask_starts step".split()
NARROW = "indptr splits offsets kept req_to_token book owners protected lengths".split()
types = dict.fromkeys(WIDE, "*i64") | dict.fromkeys(NARROW, "*i32") | {"stride_request": "i64"}
for swa, repair in ((False, 1), (True, 2)):
    given = dict(
        HAS_SPLITS=not swa, HAS_OFFSETS=swa, HAS_MASK=swa, HAS_TRUTH=True, HAS_SHADOW=True,
        HAS_OWNERS=True, HAS_STEP=swa, SWA=swa, REPAIR=repair, FENCE=True, ROWS=64,
    )
    const = {p.name: given.get(p.name, p.default) for p in kernel.params if p.is_constexpr}
    signature = {n: "constexpr" if n in const else types.get(n, "i32") for n in kernel.arg_names}
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=const),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": 4},
    )
    assert made.asm["cubin"]
    print("COMPILED")
"""


def test_it_compiles_for_sm90(tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # Triton reads the source of a kernel from a file.
    script = tmp_path / "compile.py"
    script.write_text(inspect.cleandoc(COMPILE))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.count("COMPILED") == 2, done.stderr[-3000:]
