"""Answers that the GPU is an sm100, where SGLang checks the arguments for the attention backend.

SGLang allows `trtllm_mha` and `trtllm_mla` only on some GPUs, and the former's prefill by the
kernel that the CPU engine stands in for only on sm100. All else that it asks about the platform, it
is told truthfully.
"""

from __future__ import annotations

from typing import Any


def is_sm100_supported() -> bool:
    """Stands in for SGLang's function of this name, up to 0.5.20."""
    return True


class _Platform:
    """SGLang's platform, with one answer that is true."""

    def __init__(self, true: str) -> None:
        self._true = true

    def __getattr__(self, name: str) -> Any:
        from sglang.srt import runtime_context

        return name == self._true or getattr(runtime_context.get_platform(), name)


def get_platform() -> _Platform:
    """Stands in for the `get_platform` that the module for attention arguments imported."""
    return _Platform("is_sm100")


def blackwell() -> _Platform:
    """The same for the module that checks the arguments of `trtllm_mla`."""
    return _Platform("is_blackwell")
