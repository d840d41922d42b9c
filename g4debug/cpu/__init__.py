"""The CPU engine: real SGLang on a machine without a GPU.

The scheduler, the pools, the allocators, `TRTLLMHAAttnBackend` and the FROZEN_KV_MTP worker are
SGLang's own. Only the few kernels that need CUDA are replaced, by stand-ins in torch;
`attach.TABLE` lists each of them with the reason. There are two halves:

* `environment()` and `prepare()` give a process what it needs *before* it imports SGLang.
* `activate()` is called by `g4debug.plugin.register` in each SGLang process (`G4DEBUG_CPU=1`).

`python -m g4debug.cpu script.py ...` runs any Python command line in that environment. Importing
this package imports neither torch nor sglang.
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

# A process and its children read these before SGLang is imported, or while it is.
SETTINGS: Final[Mapping[str, str]] = {
    "G4DEBUG_CPU": "1",  # makes the plugin call activate() in every SGLang process
    "SGLANG_USE_CPU_ENGINE": "1",  # SGLang's own switch for device=cpu
    "TRITON_INTERPRET": "1",  # Triton's interpreter runs SGLang's Triton kernels
    "SGLANG_FLASHINFER_WORKSPACE_SIZE": str(1 << 20),  # not 512 MB: the stand-ins need none
    # SGLang asks for FlashInfer's wheel, for CUDA, in whose place the stand-ins are.
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    # SGLang keeps the last tokens of a convolution in bfloat16 whatever the model is in; with the
    # toys, which are in float32, an answer would depend on where a chunk ended.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "OMP_NUM_THREADS": "1",  # tiny tensors: a second thread costs more than it gives
    "TORCHDYNAMO_DISABLE": "1",  # compiling SGLang's few small functions costs more than they do
    "TOKENIZERS_PARALLELISM": "false",  # SGLang forks after it used the tokenizer
    "HF_HUB_OFFLINE": "1",  # the models are local directories: never ask the network
}


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base`, and the variables that a child process needs to run SGLang on the CPU.

    The switches that the engine cannot do without override a value in `base`. The others, such as
    the size of the workspace, keep it.
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
    """Make this process and its children able to import SGLang. Call it before that import."""
    refuse_cuda("g4debug.cpu.prepare()")
    if "sglang" in sys.modules and os.environ.get("G4DEBUG_CPU") != "1":
        raise CpuEngineError(
            "g4debug.cpu.prepare() came too late: this process has imported sglang already. "
            "Call prepare() before that, or run `python -m g4debug.cpu ...`."
        )
    os.environ.update(environment(os.environ))
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
    importlib.import_module("g4debug_torchvision").declare_on_import()


def activate() -> None:
    """Install the stand-ins in this SGLang process. A second call does nothing.

    Raises CpuEngineError where CUDA is available.
    """
    refuse_cuda("g4debug.cpu.activate()")
    if os.environ.get("TRITON_INTERPRET") != "1" or str(SITE) not in sys.path:
        raise CpuEngineError(
            "g4debug.cpu.activate(): this process has not got the CPU engine's environment, in "
            "which TRITON_INTERPRET is '1' (here it is "
            f"{os.environ.get('TRITON_INTERPRET')!r}) and {SITE} is on sys.path (here it is "
            f"{'' if str(SITE) in sys.path else 'not '}on it). "
            "Start it with `python -m g4debug.cpu ...`, or call g4debug.cpu.prepare() first."
        )
    # They import torch, which only SGLang processes need.
    from g4debug.cpu import attach, interpreter, served_models

    interpreter.quicken()
    served_models.install()
    attach.install()


def refuse_cuda(caller: str) -> None:
    """Raise `CpuEngineError` where the real kernels could run."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # without a driver there is no CUDA, and a launcher need not import torch
    import torch

    if torch.cuda.is_available():
        raise CpuEngineError(
            f"{caller}: this machine has a CUDA device ({torch.cuda.get_device_name(0)}), and the "
            "CPU engine is only for machines without one. Run SGLang itself here, or hide the "
            "device with CUDA_VISIBLE_DEVICES=''."
        )
