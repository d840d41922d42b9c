"""The models of the measurements under load, and the servers' arguments for them.

As a program, ``python -m measuring.models NAME DEVICE``, it writes a model and prints its two
folders: a process that starts a server must not have used the GPU itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.workload import in_memory
from workloads import shapes
from workloads.e4b_trtllm_mtp import cpu, cuda

from g4debug.cpu.geometry import E4B_256
from g4debug.cpu.models import tiny_models, write
from measuring.servers import BENCHMARKS

# E4B's layers, but few of them and a small vocabulary: a token's KV is small, so that a prefix
# cache of many nodes fits, and a forward is short, so that what is no forward can be seen.
SHALLOW = replace(E4B_256, pattern="ssfsssf", kv_shared=4, vocab=32_768)
# E4B, with so small a vocabulary that four servers fit on one GPU of 80 GB.
SHORT = replace(E4B_256, vocab=32_768)
FOR_64 = {"cuda_graph_bs": [1, 8, 64], "cuda_graph_max_bs": 64, "max_running_requests": 64}
GEOMETRIES = {"E4B": E4B_256, "E4B-32k": SHORT, "shallow": SHALLOW}
NAMES = (*GEOMETRIES, *shapes.SHAPES)


def vocabulary(name: str) -> int:
    """How many tokens a model of NAMES has."""
    if name in GEOMETRIES:
        return GEOMETRIES[name].vocab
    return int(shapes.SHAPES[name]["vocab_size"])


def arguments(name: str, device: str, **overrides: Any) -> dict[str, Any]:
    """The arguments of sgl.Engine: the demo's, with the prefix cache on.

    The weights are written if they are not there. The shapes of other models (workloads/shapes.py)
    have weights that SGLang draws, no draft, and SGLang's own choice of an attention backend.
    """
    if name in shapes.SHAPES:
        made = shapes.engine(name, **overrides)
        made.pop("decode_log_interval")
        return {**made, "log_level": "warning"}
    command = [sys.executable, "-m", "measuring.models", name, device]
    done = subprocess.run(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True, check=True)
    target, draft = map(Path, json.loads(done.stdout.splitlines()[-1]))
    made = dict((cuda(None, (target, draft)) if device == "cuda" else cpu(None)).engine)
    for unused in ("disable_radix_cache", "swa_full_tokens_ratio", "decode_log_interval"):
        made.pop(unused, None)
    return {**made, "log_level": "warning", **overrides}


def main(name: str, device: str) -> None:
    if device == "cpu":
        made = tiny_models()
    else:
        made = write(GEOMETRIES[name], in_memory(f"g4debug-load-{name}"), device=device)
    print(json.dumps([str(path) for path in made]))


if __name__ == "__main__":
    main(*sys.argv[1:])
