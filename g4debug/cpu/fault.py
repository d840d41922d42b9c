"""A sticky device fault on a machine with no device.

On a GPU, an attention kernel that follows a bad page does not fail where it runs: the launch
returns, and a later call that waits for the device raises, far from the cause, for ever after.
The attention stand-in behaves alike: it calls `record()` and goes on; from then on each call that
would copy from the device to the host raises `torch.AcceleratorError` with CUDA's own words.

What is approximated: on a CPU nothing tells a tensor that a GPU server keeps on the device from one
that it keeps on the host. So every synchronising call counts, except those made

* inside the model forward (`ModelRunner.forward`): layers do not synchronise on a GPU, and it keeps
  the traceback as misplaced as it is there;
* inside the stand-ins, which play the device;
* on a source line that names a `..._cpu` tensor, as SGLang calls its host copies;
* by g4debug's own dump and recorder code and by torch's serialisation, which read host memory.

Nothing is patched until a fault is recorded, so a healthy engine pays nothing at all.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

# What copies device memory to the host, and so waits for the device, on a CUDA tensor.
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
_DEVICE_MODULES: Final = frozenset({"g4debug.cpu.paged_attention"})
_HOST_MODULES: Final = frozenset(
    {
        "g4debug.dumps.reading",
        "g4debug.dumps.writing",
        "g4debug.findings.steps",
        "g4debug.trapping.trap",
        "torch.serialization",
    }
)


@dataclass(frozen=True)
class DeviceFault:
    """Where the illegal access really happened. CUDA would not tell; tests may ask."""

    kernel: str
    row: int
    column: int
    page: int
    num_pages: int
    window_left: int

    def __str__(self) -> str:
        return (
            f"{self.kernel}: row {self.row}, column {self.column}: page {self.page} is outside "
            f"0 <= page < {self.num_pages} (window_left={self.window_left})"
        )


_pending: DeviceFault | None = None
_originals: dict[str, Any] = {}


def pending() -> DeviceFault | None:
    """The fault that the imaginary device has suffered, if any."""
    return _pending


def record(fault: DeviceFault) -> None:
    """Break the device. The first fault wins; it stays broken until `clear()`."""
    global _pending
    if _pending is None:
        _pending = fault
        _arm()


def clear() -> None:
    """Mend the device and unpatch torch. Only tests can do that; a CUDA context stays dead."""
    global _pending
    _pending = None
    for name, original in _originals.items():
        if original is None:
            delattr(torch.Tensor, name)  # uncovers the inherited method
        else:
            setattr(torch.Tensor, name, original)
    _originals.clear()


def _arm() -> None:
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
