"""A mixture of experts in torch: SGLang's method for CPUs does not take Gemma-4's, nor biases.

Nor is Triton's interpreter fast enough for the kernel that adds Qwen3-Next's shared expert.
"""

from __future__ import annotations

from typing import Any

import torch


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


def narrowed(
    param_data: Any, loaded_weight: Any, param_data_start: int, weight_start: int, dim: int,
    *more: Any,
) -> Any:  # fmt: skip
    """Stands in for ``narrow_padded_param_and_loaded_weight``, which is told a weight's ``dim``.

    A bias, such as gpt-oss' experts have, has one dimension less than the weight.
    """
    from sglang.srt.model_loader.weight_utils import narrow_padded_param_and_loaded_weight

    dim = min(dim, loaded_weight.dim() - 1)
    return narrow_padded_param_and_loaded_weight(
        param_data, loaded_weight, param_data_start, weight_start, dim, *more
    )


def fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add to each token's ``final_hidden_states`` what the shared expert says, gated.

    The gate of a token is ``sigmoid(<hidden_states, gate_weight>)``. All are ``[tokens, hidden]``,
    but for gate_weight, ``[hidden]``; ValueError for other shapes. Computed in float32.
    """
    tokens, hidden = hidden_states.shape
    for tensor, shape in (
        (gate_weight, (hidden,)),
        (shared_output, (tokens, hidden)),
        (final_hidden_states, (tokens, hidden)),
    ):
        if tensor.shape != shape:
            raise ValueError(
                "the CPU engine's fused_gate_sigmoid_mul_add: got a tensor with the shape "
                f"{tuple(tensor.shape)}, expected {shape}."
            )
    gates = (hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True).sigmoid()
    final_hidden_states.copy_(final_hidden_states.float() + gates * shared_output.float())
