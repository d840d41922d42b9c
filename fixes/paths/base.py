"""What the performance paths share: where they may not run, and saying so once."""

from __future__ import annotations

import logging
from typing import Any

from g4debug.settings import Settings

logger = logging.getLogger("g4debug")
_said: set[tuple[str, str]] = set()


def server_limit(path: str) -> str:
    """Why a server with these arguments does not run a path; '' if it does.

    On a CPU it does where the environment forces the path on: Triton's interpreter then runs its
    kernels, which is slow and for tests. Otherwise the CPU engine stays SGLang's own.
    """
    import torch
    from sglang.srt.server_args import get_global_server_args

    args = get_global_server_args()
    cuda = str(args.device).startswith("cuda") and torch.version.hip is None
    if not cuda and not (args.device == "cpu" and Settings.from_environ().fixes.get(path)):
        kind = "ROCm" if torch.version.hip else args.device
        return f"the device is {kind}, the kernels were measured on CUDA only"
    if why := numbers_limit(args):
        return why
    if getattr(args, "enable_torch_compile", False):
        return "--enable-torch-compile fuses these operations itself"
    if getattr(args, "debug_tensor_dump_output_folder", None):
        return "--debug-tensor-dump-output-folder wants every module to be called"
    return ""


def numbers_limit(args: Any) -> str:
    """Why a server with these ServerArgs takes no sums in another order; '' if it does."""
    if getattr(args, "enable_deterministic_inference", False):
        return "--enable-deterministic-inference: sums may be ordered by batch size"
    if getattr(args, "rl_on_policy_target", None):
        return "--rl-on-policy-target asks for exactly SGLang's own numbers"
    return ""


def norms_limit(layer: Any, *names: str) -> str:
    """Why a kernel may not stand in for these norms of a layer; '' if it may."""
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
    """Log that a path is active at ``where``, or why it is not. Each of the two once.

    alone: only if nothing was said of the path before. A draft's layers come after the target's,
    and are of another kind.
    """
    text = f"not used: {why_not}" if why_not else "active"
    if alone and any(path == of for of, _ in _said):
        return
    if (path, text) not in _said:
        _said.add((path, text))
        logger.info("g4debug: %s: %s (first: %s)", path, text, where)
