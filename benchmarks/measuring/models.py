"""The models of the measurements under load, and the servers' arguments for them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "repro"))

from _workload import DEVICES, cuda, in_memory  # noqa: E402

from g4debug.cpu.geometry import E4B_256  # noqa: E402

# E4B's layers, but few of them and a small vocabulary: a token's KV is small, so that a prefix
# cache of many nodes fits, and a forward is short, so that what is no forward can be seen.
SHALLOW = replace(E4B_256, pattern="ssfsssf", kv_shared=4, vocab=32_768)
GEOMETRIES = {"E4B": E4B_256, "shallow": SHALLOW}


def folder(name: str) -> Path:
    return in_memory(f"g4debug-load-{name}")


def write(name: str, device: str) -> tuple[str, str]:
    """The folders of the target and the draft. The weights are written if they are not there."""
    command = [sys.executable, str(HERE / "_write_model.py"), name, device]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    target, draft = json.loads(made.stdout.splitlines()[-1])
    return target, draft


def arguments(models: tuple[str, str], device: str, **overrides: Any) -> dict[str, Any]:
    """The arguments of sgl.Engine: the demo's, with the prefix cache on."""
    made = dict(cuda(None, models).engine if device == "cuda" else DEVICES["cpu"](None).engine)
    for name in ("disable_radix_cache", "swa_full_tokens_ratio", "decode_log_interval"):
        made.pop(name, None)
    return {**made, "log_level": "warning", **overrides}
