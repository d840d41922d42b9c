"""Shared by the performance paths: why one may not run on a server, and how that is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from g4debug.settings import Settings

logger = logging.getLogger("g4debug")
_said: set[tuple[str, str]] = set()  # path and text


def arguments() -> Any:
    """The server arguments that are in force in this process.

    From 0.5.23 on the ServerArgs stay as they were typed. What SGLang has made of an argument is
    read through the object that is returned.
    """
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:
        from sglang.srt.server_args import get_global_server_args

        return get_global_server_args()
    from sglang.srt.runtime_context import get_server_args

    return _InForce(get_server_args(), resolution_result)


class _InForce:
    """Reads ServerArgs that stay as they were typed."""

    def __init__(self, args: Any, read: Callable[[Any, str], Any]) -> None:
        self._args, self._read = args, read

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._args, name):
            raise AttributeError(f"this SGLang has no argument {name}")
        return self._read(self._args, name)


def server_limit(path: str) -> str:
    """Why a path does not run on a server with these arguments; '' if it does.

    On a CPU a path runs only if the environment forces it on, which is for tests: Triton's
    interpreter then runs its kernels, slowly. Otherwise the CPU engine runs SGLang's own code.
    """
    import torch

    args = arguments()
    cuda = str(args.device).startswith("cuda") and torch.version.hip is None
    if not cuda and not (args.device == "cpu" and Settings.from_environ().switches.get(path)):
        kind = "ROCm" if torch.version.hip else args.device
        return f"the device is {kind}, and the kernels were measured on CUDA only"
    if why := numbers_limit(args):
        return why
    if getattr(args, "enable_torch_compile", False):
        return "--enable-torch-compile fuses these operations itself"
    if getattr(args, "debug_tensor_dump_output_folder", None):
        return "--debug-tensor-dump-output-folder needs every module to be called"
    return ""


def ranks() -> Any:
    """SGLang's group of the ranks that compute a model together (a GroupCoordinator)."""
    from sglang.srt.distributed import get_tp_group

    return get_tp_group()


def numbers_limit(args: Any) -> str:
    """Why sums may not be in another order with these ServerArgs; '' if they may."""
    if getattr(args, "enable_deterministic_inference", False):
        return "--enable-deterministic-inference forbids that sums depend on the batch size"
    if getattr(args, "rl_on_policy_target", None):
        return "--rl-on-policy-target asks for exactly SGLang's own numbers"
    return ""


def norms_limit(layer: Any, *names: str) -> str:
    """Why a kernel may not replace these norms of a layer; '' if it may."""
    for name in names:
        norm = getattr(layer, name)
        kind = type(norm).__name__
        if kind == "RMSNorm":
            other = (
                norm.variance_size_override is not None
                or norm.cast_x_before_out_mul
                or getattr(norm, "fp32_residual", False)
                or getattr(norm, "override_orig_dtype", None) is not None
            )
        else:
            other = kind != "Gemma4RMSNorm" or norm.scale_shift != 0.0
        if other:
            return f"{name} is {norm!r}, expected a plain norm times weight"
    return ""


def eps_of(norm: Any) -> float:
    """The epsilon of an RMSNorm or a Gemma4RMSNorm."""
    eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return eps


def say(path: str, where: str, why_not: str, alone: bool = False) -> None:
    """Log that a path is active at ``where``, or why it is not. Each text is logged once.

    alone: log it only if nothing was logged about the path before. The draft's layers are made
    after the target's and are of another kind.
    """
    text = f"not used: {why_not}" if why_not else "active"
    if alone and any(path == of for of, _ in _said):
        return
    once(path, text, f" (first: {where})")


def once(path: str, text: str, more: str = "", level: int = logging.INFO) -> None:
    """Log ``text`` and ``more`` of a path, and the same text of it not again."""
    if (path, text) not in _said:
        _said.add((path, text))
        logger.log(level, "g4debug: %s: %s%s", path, text, more)
