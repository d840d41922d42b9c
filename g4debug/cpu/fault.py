"""Imitates an illegal memory access of a GPU on a machine without one.

On a GPU, an attention kernel that follows a bad page does not fail where it runs. The launch
returns, and a later call that waits for the device raises, far from the cause; so does every call
after it. The stand-in for attention behaves in the same way: it calls `record()` and goes on. From
then on each call that would copy from the device to the host raises `torch.AcceleratorError` with
CUDA's own words.

This is an approximation: on a CPU, a tensor that a GPU server keeps on the device looks like one
that it keeps on the host. So every call that would wait for a device raises, except a call

* inside the model forward (`ModelRunner.forward`): layers do not wait for the device on a GPU, and
  so the traceback points to as wrong a place as it does there;
* inside the stand-ins, which play the device;
* on a source line that names a `..._cpu` tensor, which is how SGLang names its host copies;
* from g4debug's own code for dumps and steps, or from torch's serialisation: they read host memory.

Nothing is patched before a fault is recorded, so a healthy engine pays nothing.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

# On a CUDA tensor these copy device memory to the host, and so wait for the device.
SYNCHRONISING: Final = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)

CUDA_TEXT: Final = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
STAND_IN_TEXT: Final = (
    "(g4debug: raised by the CPU engine's stand-in for the attention kernel, which faults as the "
    "GPU does; no CUDA device is involved)"
)

_FORWARD: Final = ("sglang.srt.model_executor.model_runner", "forward")
_DEVICE_MODULES: Final = frozenset(
    f"g4debug.cpu.{name}"
    for name in (
        "paged_attention",
        "token_attention",
        "flashinfer_wrappers",
        "pages_only",
        "page_kernels",
        "short_conv",
        "delta_rule",
    )
)
_HOST_MODULES: Final = frozenset(
    {
        "g4debug.dumps.reading",
        "g4debug.dumps.writing",
        "g4debug.findings.steps",
        "g4debug.findings.tape_record",
        "g4debug.replay.feeder",
        "g4debug.tracers.flight_recorder.taping",
        "g4debug.trapping.trap",
        "torch.serialization",
    }
)


@dataclass(frozen=True)
class DeviceFault:
    """Where the illegal access really happened. CUDA would not tell this; it is for tests."""

    kernel: str
    row: int
    column: int
    page: int
    num_pages: int
    window_left: int
    unit: str = "page"  # what the kernel's table or list names: pages, or single tokens

    def __str__(self) -> str:
        return (
            f"{self.kernel}: row {self.row}, column {self.column}: {self.unit} {self.page} is "
            f"outside 0 <= {self.unit} < {self.num_pages} (window_left={self.window_left})"
        )


_pending: DeviceFault | None = None
_originals: dict[str, Any] = {}


def pending() -> DeviceFault | None:
    """The fault of the imaginary device, or None."""
    return _pending


def record(fault: DeviceFault) -> None:
    """Break the device, until `clear()` is called. Only the first fault counts."""
    global _pending
    if _pending is None:
        _pending = fault
        _patch()


def clear() -> None:
    """Mend the device and undo the patches of torch. It is for tests; a CUDA context stays dead."""
    global _pending
    _pending = None
    for name, original in _originals.items():
        if original is None:
            delattr(torch.Tensor, name)  # uncovers the inherited method
        else:
            setattr(torch.Tensor, name, original)
    _originals.clear()


def _patch() -> None:
    for name in SYNCHRONISING:
        _originals[name] = torch.Tensor.__dict__.get(name)
        setattr(torch.Tensor, name, _raising(getattr(torch.Tensor, name)))


def _raising(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def synchronise(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _pending is not None and not _exempt():
            raise torch.AcceleratorError(CUDA_TEXT + STAND_IN_TEXT)
        return method(self, *args, **kwargs)

    return synchronise


def _exempt() -> bool:
    """Is this call inside the forward, inside the device, or a read of host memory?"""
    frame = sys._getframe(2)
    if "_cpu" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        return True
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module in _DEVICE_MODULES or module in _HOST_MODULES:
            return True
        if (module, frame.f_code.co_name) == _FORWARD:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
