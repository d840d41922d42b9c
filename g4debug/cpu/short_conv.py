"""LFM2's short convolution (SGLang's ``causal_conv1d_fn`` and ``causal_conv1d_update``).

Each channel c has a filter of its own over the last w tokens of a sequence, and nothing ahead of a
token counts::

    y[t, c] = sum over j < w of weight[c, j] * x[t - w + 1 + j, c]

A server keeps the last w - 1 tokens of each request in a slot of ``conv_states``, so that a chunk
or a decode goes on where the last one ended. Before the first token of a sequence there are zeros.

Shapes: conv_states ``[slots, channels, w - 1]``; weight ``[channels, w]``; x and the result
``[channels, tokens]`` in a prefill, where the tokens of request b begin at ``query_start_loc[b]``,
and ``[requests, channels]`` in a decode. The slots are written in place. All is computed in
float32. The stand-ins are needed because SGLang's kernels are for CUDA, and Triton's interpreter
refuses them: "mask has unsupported dtype".

A request in slot -1 is padding, and its output is zeros. Another slot outside of ``conv_states`` is
a device fault and not an exception (see `fault`), and the output is zeros, too.
"""

from __future__ import annotations

from typing import Final

import torch

from g4debug.cpu import fault
from g4debug.cpu.paged_attention import refuse

PADDING: Final = -1  # SGLang's PAD_SLOT_ID


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """A prefill. has_initial_state: whether a request goes on from its slot."""
    refuse("causal_conv1d_fn", {**options, "bias": bias})
    if query_start_loc is None or cache_indices is None or has_initial_state is None:
        raise NotImplementedError(
            "the CPU engine's causal_conv1d_fn: got a call without query_start_loc, cache_indices "
            "or has_initial_state, expected all three, as LFM2 gives them."
        )
    assert conv_states is not None
    out = torch.zeros_like(x)
    starts = query_start_loc.tolist()
    for b, slot in enumerate(cache_indices.tolist()):
        begin, end = starts[b], starts[b + 1]
        if begin < end and _there("causal_conv1d_fn", b, slot, conv_states):
            if not has_initial_state[b]:
                conv_states[slot] = 0
            out[:, begin:end] = _filtered(x[:, begin:end], weight, conv_states[slot])
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """A decode: one token of each request."""
    refuse("causal_conv1d_update", {**options, "bias": bias})
    assert conv_state_indices is not None
    out = torch.zeros_like(x)
    for b, slot in enumerate(conv_state_indices.tolist()):
        if _there("causal_conv1d_update", b, slot, conv_state):
            out[b] = _filtered(x[b, :, None], weight, conv_state[slot])[:, 0]
    return out


def _there(kernel: str, row: int, slot: int, states: torch.Tensor) -> bool:
    if slot != PADDING and not 0 <= slot < len(states):
        fault.record(fault.DeviceFault(kernel, row, 0, slot, len(states), -1, unit="slot"))
    return 0 <= slot < len(states)


def _filtered(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``[channels, tokens]`` of one request, behind the tokens of its slot, which then has the last
    ones of x."""
    known = torch.cat((state.float(), x.float()), 1)
    state.copy_(known[:, known.shape[1] - state.shape[1] :])
    return (known.unfold(1, weight.shape[1], 1) * weight.float()[:, None]).sum(-1).to(x.dtype)
