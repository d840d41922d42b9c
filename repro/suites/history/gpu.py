"""The suite's engines on a GPU: the toy model in shapes that real kernels take, eager.

Without CUDA graphs, because the ground truths wrap functions of Python, which a graph would not
call again.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from suites.history.case import Arm, Case

# The suite's first release in which trtllm_mha computes prompts on an sm90 GPU, too.
PREFILL_ON_SM90 = Version("0.5.23")
VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE = 2.5  # times as long as on a CPU: kernels are compiled at their first use
_turn = itertools.count()
_lock = threading.Lock()


def engine_arguments(case: Case, side: Arm, **more: Any) -> dict[str, Any]:
    """Keyword arguments of ``sgl.Engine`` for a case on a GPU."""
    from g4debug.cpu.geometry import TINY_256
    from g4debug.cpu.models import write
    from g4debug.cpu.server import server_arguments

    folder = Path.home() / ".cache" / "g4debug" / "models" / "tiny-256"
    whole = Version(side.release) >= PREFILL_ON_SM90
    return server_arguments(
        write(TINY_256, folder),
        case.mtp,
        **{
            "device": "cuda",
            "dtype": "bfloat16",
            "attention_backend": "trtllm_mha" if whole else "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            **more,
        },
    )


@cache
def names() -> list[str]:
    """The GPUs of this machine. Raises RuntimeError with nvidia-smi's words if there is none.

    Asked of nvidia-smi, because whoever asks torch has a CUDA context of his own from then on.
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise RuntimeError(
            f"history suite: --device cuda needs a GPU, and nvidia-smi found none: {e}"
        ) from e
    return done.stdout.split("\n")[:-1]


def environment(case: Case, side: Arm) -> dict[str, str]:
    """The GPU of a cell: they take turns. An engine on several GPUs sees all of them.

    All of those that the suite itself may see.
    """
    wanted = int({**case.engine, **side.engine}.get("tp_size", 1))
    if wanted > 1:
        # Other cells have memory on one of the GPUs, and less on the other.
        return {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    with _lock:
        return {VISIBLE: visible()[next(_turn) % len(visible())]}


def visible() -> list[str]:
    """The GPUs that this process may see, as ``CUDA_VISIBLE_DEVICES`` names them."""
    given = os.environ.get(VISIBLE, "")
    return given.split(",") if given else [str(n) for n in range(len(names()))]
