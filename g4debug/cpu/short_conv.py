"""Linear layers' short convolution (``causal_conv1d_fn``, ``causal_conv1d_update`` of SGLang).

Each channel c has a filter of its own over the last w tokens of a sequence, and nothing ahead of a
token counts::

    y[t, c] = sum over j < w of weight[c, j] * x[t - w + 1 + j, c]

Qwen3-Next's has an activation behind it, silu(y) = y sigmoid(y), and LFM2's has none.

A server keeps the last w - 1 tokens of each request in a slot of ``conv_states``, so that a chunk
or a decode goes on where the last one ended. Before the first token of a sequence there are zeros.

Shapes: conv_states ``[slots, channels, w - 1]``; weight ``[channels, w]``; x and the result
``[channels, tokens]`` in a prefill, where the tokens of request b begin at ``query_start_loc[b]``,
and ``[requests, channels]`` in a decode. The slots are written in place. All is computed in
float32. The stand-ins are needed because SGLang's kernels are for CUDA, and Triton's interpreter
refuses them: "mask has unsupported dtype". For Qwen3-Next, SGLang's branch for CPUs would call
kernels of a wheel that is not there.

A request in slot -1 is padding, and its output is zeros. Another slot outside of ``conv_states`` is
a device fault and not an exception (see `fault`), and the output is zeros, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch.nn import functional

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
    activation: str | None = None,
    seq_lens_cpu: Sequence[int] | None = None,
    **options: object,
) -> torch.Tensor:
    """A prefill. has_initial_state: whether a request goes on from its slot.

    seq_lens_cpu: the requests' tokens, which ``query_start_loc`` tells, too.
    """
    _refuse("causal_conv1d_fn", bias, activation, options)
    if query_start_loc is None or cache_indices is None or has_initial_state is None:
        raise NotImplementedError(
            "the CPU engine's causal_conv1d_fn: got a call without query_start_loc, cache_indices "
            "or has_initial_state, expected all three, as its toy models give them."
        )
    assert conv_states is not None
    out = torch.zeros_like(x)
    starts = query_start_loc.tolist()
    lengths = [end - begin for begin, end in pairwise(starts)]
    if seq_lens_cpu is not None and list(seq_lens_cpu) != lengths:
        raise ValueError(
            f"the CPU engine's causal_conv1d_fn: got seq_lens_cpu={list(seq_lens_cpu)}, expected "
            f"{lengths}, as query_start_loc has it."
        )
    for b, slot in enumerate(cache_indices.tolist()):
        begin, end = starts[b], starts[b + 1]
        if begin < end and there("causal_conv1d_fn", b, slot, conv_states):
            if not has_initial_state[b]:
                conv_states[slot] = 0
            out[:, begin:end] = _filtered(x[:, begin:end], weight, conv_states[slot])
    return _activated(out, activation)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """A decode: one token of each request."""
    _refuse("causal_conv1d_update", bias, activation, options)
    assert conv_state_indices is not None
    out = torch.zeros_like(x)
    for b, slot in enumerate(conv_state_indices.tolist()):
        if there("causal_conv1d_update", b, slot, conv_state):
            out[b] = _filtered(x[b, :, None], weight, conv_state[slot])[:, 0]
    return _activated(out, activation)


def _refuse(
    kernel: str, bias: torch.Tensor | None, activation: str | None, options: Mapping[str, object]
) -> None:
    other = None if activation == "silu" else activation
    refuse(kernel, {**options, "bias": bias, "activation": other})


def _activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    return x if activation is None else functional.silu(x.float()).to(x.dtype)


def there(kernel: str, row: int, slot: int, states: torch.Tensor) -> bool:
    """False for padding, and for a slot outside of ``states``, which breaks the device."""
    if slot != PADDING and not 0 <= slot < len(states):
        fault.record(fault.DeviceFault(kernel, row, 0, slot, len(states), -1, unit="slot"))
    return 0 <= slot < len(states)


def _filtered(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``[channels, tokens]`` of one request, behind the tokens of its slot, which then has the last
    ones of x."""
    known = torch.cat((state.float(), x.float()), 1)
    state.copy_(known[:, known.shape[1] - state.shape[1] :])
    return (known.unfold(1, weight.shape[1], 1) * weight.float()[:, None]).sum(-1).to(x.dtype)
