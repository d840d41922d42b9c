"""Real SGLang on a machine with no GPU.

Everything runs as shipped (scheduler, pools, allocators, `TRTLLMHAAttnBackend`, the FROZEN_KV_MTP
worker) except the few kernels that need CUDA, which torch stand-ins replace; `attach.TABLE` lists
every one of them with its reason. Two halves:

* `environment()` / `prepare()`: what a process needs *before* it imports SGLang.
* `activate()`: what `g4debug.plugin.register` calls in each SGLang process (`G4DEBUG_CPU=1`).

`python -m g4debug.cpu script.py ...` runs any Python command line in that environment.
Importing this package is cheap: no torch, no sglang.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from g4debug.cpu.error import CpuEngineError as CpuEngineError

SITE: Final = Path(__file__).parent / "site"

# What a process and its spawned children read before or while SGLang is imported.
SETTINGS: Final[Mapping[str, str]] = {
    "G4DEBUG_CPU": "1",  # the plugin calls activate() in every SGLang process
    "SGLANG_USE_CPU_ENGINE": "1",  # SGLang's own switch for device=cpu
    "TRITON_INTERPRET": "1",  # Triton's own interpreter runs SGLang's kernels
    "SGLANG_FLASHINFER_WORKSPACE_SIZE": str(1 << 20),  # the stand-ins need no 512 MB workspace
    "OMP_NUM_THREADS": "1",  # tiny tensors: a second thread costs more than it gives
    "TORCHDYNAMO_DISABLE": "1",  # compiling SGLang's few small functions costs more than they do
    "TOKENIZERS_PARALLELISM": "false",  # SGLang forks helpers after the tokenizer was used
    "HF_HUB_OFFLINE": "1",  # the models are local directories: never ask the network
}


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` plus all that a child process needs to run SGLang on the CPU.

    A variable that `base` already sets to another value is overridden for the switches the engine
    cannot do without, and kept for the merely sensible ones (workspace size, offline hub).
    """
    merged = dict(base)
    for name, value in SETTINGS.items():
        if name in ("G4DEBUG_CPU", "SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET"):
            merged[name] = value
        else:
            merged.setdefault(name, value)
    rest = [p for p in merged.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(SITE)]
    merged["PYTHONPATH"] = os.pathsep.join([str(SITE), *rest])
    return merged


def prepare() -> None:
    """Make this process and its children able to import SGLang; call it before that import."""
    refuse_cuda("g4debug.cpu.prepare()")
    if "sglang" in sys.modules and os.environ.get("G4DEBUG_CPU") != "1":
        raise CpuEngineError(
            "g4debug.cpu.prepare() came too late: got sglang already imported, expected a process "
            "that has not imported it. Call prepare() first, or run `python -m g4debug.cpu ...`."
        )
    os.environ.update(environment(os.environ))
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
    importlib.import_module("g4debug_torchvision").declare_on_import()


def activate() -> None:
    """Install the stand-ins in this SGLang process. Idempotent; refuses where CUDA is available."""
    refuse_cuda("g4debug.cpu.activate()")
    if os.environ.get("TRITON_INTERPRET") != "1" or str(SITE) not in sys.path:
        raise CpuEngineError(
            "g4debug.cpu.activate(): got a process without the CPU engine's environment "
            f"(TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')!r}, {SITE} "
            f"{'on' if str(SITE) in sys.path else 'not on'} sys.path), expected both in place. "
            "Start it with `python -m g4debug.cpu ...`, or call g4debug.cpu.prepare() first."
        )
    from g4debug.cpu import attach  # imports torch, which only SGLang processes need

    attach.install()


def refuse_cuda(caller: str) -> None:
    """Raise `CpuEngineError` where the real kernels could run."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no driver, no CUDA: spares a launcher the import of torch
    import torch

    if torch.cuda.is_available():
        raise CpuEngineError(
            f"{caller}: got a machine with a CUDA device ({torch.cuda.get_device_name(0)}), "
            "expected none. The stand-ins are for machines without one: here run SGLang itself, "
            "or hide the device with CUDA_VISIBLE_DEVICES=''."
        )
