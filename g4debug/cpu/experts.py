"""Runs a mixture of experts in torch, because SGLang's method for CPUs does not take Gemma-4's."""

from __future__ import annotations

from typing import Any


def forward_cpu(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Stands in for ``UnquantizedFusedMoEMethod.forward_cpu``, which asserts that experts use silu.

    Gemma-4's experts use gelu. The stand-in calls SGLang's own torch code for experts, which that
    method would call next and which handles both.
    """
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    output = moe_forward_native(
        layer, dispatch_output.hidden_states, dispatch_output.topk_output, self.moe_runner_config
    )
    return StandardCombineInput(hidden_states=output)
