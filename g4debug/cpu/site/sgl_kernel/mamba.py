"""The kernels of linear attention, whose names SGLang imports for every model with states.

None of them works here: calling one raises an error. What LFM2 and Qwen3-Next need has stand-ins,
which replace these names where SGLang has imported them.
"""

from collections.abc import Callable

import torch

_OPS = ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu")
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name in _OPS:  # SGLang takes these from torch.ops; one without an implementation raises
    _LIBRARY.define(f"{_name}() -> ()")  # type: ignore[no-untyped-call]


def __getattr__(name: str) -> Callable[..., None]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"sgl_kernel.mamba has no {name}")

    def fail(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.mamba.{name} is of a wheel for CUDA, and the CPU engine has no stand-in "
            "for it. Of the models with linear attention it serves LFM2 and Qwen3-Next only."
        )

    fail.__name__ = name
    return fail
