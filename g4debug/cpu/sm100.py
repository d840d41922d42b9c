"""Answers that the GPU is an sm100, where SGLang checks the arguments for the attention backend.

SGLang allows `trtllm_mha` only on some GPUs, and its prefill by the kernel that the CPU engine
stands in for only on sm100. All else that it asks about the platform, it is told truthfully.
"""

from __future__ import annotations

from typing import Any


def is_sm100_supported() -> bool:
    """Stands in for SGLang's function of this name, up to 0.5.20."""
    return True


class _Platform:
    """SGLang's platform, with `is_sm100` true."""

    is_sm100 = True

    def __getattr__(self, name: str) -> Any:
        from sglang.srt import runtime_context

        return getattr(runtime_context.get_platform(), name)


def get_platform() -> _Platform:
    """Stands in for the `get_platform` that the module for attention arguments imported."""
    return _Platform()
