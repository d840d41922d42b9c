"""The gated delta rule of Qwen3-Next's linear layers, a recurrence over the tokens of a sequence.

Each head of the values keeps a matrix S, ``[V, K]``, of what was written under which key. A token
with the query q, key k and value v lets it fade, corrects what is under k, and reads::

    S = exp(g) S
    S = S + beta (v - S k) k^T
    o = S q / sqrt(K)

where q and k were brought to length 1 (1e-6 is added to the squared length), and the gates are ::

    g = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b)

Heads are grouped: head h of the values has the q and k of head h // (value_heads / key_heads).

Shapes: q, k ``[1, tokens, key_heads, K]``; v and the result ``[1, tokens, value_heads, V]``; a, b
``[tokens, value_heads]``; A_log, dt_bias ``[value_heads]``; g, beta ``[1, tokens, value_heads]``,
in float32. A request's matrices lie in its slot of the states, ``[slots, value_heads, V, K]``, from
which it goes on and which is written in place; the pool has cleared the slot of a new request. The
tokens of request b begin at ``cu_seqlens[b]``; behind those of the last, there may be more, whose
output is zeros. All is computed in float32, token by token.

The stand-ins are needed because SGLang's branch for CPUs calls kernels of a wheel that is not
there, and its Triton kernel for a prefill refuses float32. The one for a decode takes too long in
Triton's interpreter; a test compares them with it there.

A request in slot -1 is padding, and its output is zeros. Another slot outside of the states is a
device fault and not an exception (see `fault`), and the output is zeros, too. What no toy uses, and
shapes that do not fit, are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from g4debug.cpu.paged_attention import refuse
from g4debug.cpu.short_conv import there

CHUNK = 64  # tokens: what SGLang calls mamba_chunk_size
THRESHOLD = 20.0  # above it softplus(x) is x


def keeps_states(own: object) -> Callable[[], bool]:
    """`_platform_supports_mamba_cache_extra_buffer`: here a prefill tells them as on a GPU.

    SGLang keeps them for the models that it has in a list, Qwen3-Next among them and not LFM2.
    """
    return lambda: True


def fused_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta of a prefill."""
    heads = len(A_log)
    _expect("fused_gdn_gating", {"a": a, "b": b}, len(a), heads)
    _expect("fused_gdn_gating", {"dt_bias": dt_bias}, heads)
    g = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float(), 1.0, THRESHOLD)
    return g[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: object,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """A prefill: its outputs, nothing, and the states with which each ``CHUNK`` of tokens begins.

    The prefix cache keeps one of the latter, ``[1, chunks, value_heads, V, K]``: those of the first
    request, of the second, and so on. In the second place are a request's last states where a
    kernel does not write them in place. initial_state: the states of all slots.
    initial_state_indices: the requests' slots.
    """
    kernel = "chunk_gated_delta_rule"
    refuse(kernel, options)
    _checked(kernel, q, k, v, initial_state, use_qk_l2norm_in_kernel)
    _expect(kernel, {"g": g, "beta": beta}, *v.shape[:3])
    bounds = _bounds(kernel, cu_seqlens, initial_state_indices, v.shape[1])
    group = v.shape[2] // q.shape[2]
    out, begun = torch.zeros_like(v), [initial_state[:0].float()]
    for row, slot in enumerate(initial_state_indices.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        own, starts = slice(begin, end), range(begin, end, CHUNK)
        begun.append(torch.zeros(len(starts), *initial_state.shape[1:]))
        if begin < end and there(kernel, row, slot, initial_state):
            out[0, own] = _recurrence(
                _heads(q[0, own], group), _heads(k[0, own], group), v[0, own].float(),
                g[0, own].float().exp(), beta[0, own].float(), initial_state[slot],
                begun[-1],
            )  # fmt: skip
    return out, None, torch.cat(begun)[None]


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = THRESHOLD,
    **options: object,
) -> torch.Tensor:
    """A decode: one token of each request, and its gates."""
    kernel = "fused_sigmoid_gating_delta_rule_update"
    other = None if (softplus_beta, softplus_threshold) == (1.0, THRESHOLD) else softplus_beta
    refuse(kernel, {**options, "softplus_beta": other})
    rows = len(initial_state_indices)
    bounds = _bounds(kernel, cu_seqlens, initial_state_indices, v.shape[1])
    if bounds != list(range(rows + 1)):
        raise NotImplementedError(
            f"the CPU engine's {kernel}: got cu_seqlens={bounds}, expected one token of each of "
            f"the {rows} requests: its toy models have no draft."
        )
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state_source, initial_state_indices, cu_seqlens,
        use_qk_l2norm_in_kernel,
    )[0]  # fmt: skip


def _recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fading: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    begun: torch.Tensor,
) -> torch.Tensor:
    """The outputs of one request, ``[tokens, value_heads, V]``, whose state is written.

    begun: it gets the states with which the chunks begin.
    """
    known = state.float()
    out = torch.empty(v.shape)
    for t in range(len(v)):
        if t % CHUNK == 0:
            begun[t // CHUNK] = known
        known = known * fading[t, :, None, None]
        wrong = v[t] - (known * k[t, :, None]).sum(-1)
        known = known + (beta[t, :, None] * wrong)[..., None] * k[t, :, None]
        out[t] = (known * q[t, :, None]).sum(-1)
    state.copy_(known)
    scale: float = q.shape[-1] ** -0.5
    return (out * scale).to(v.dtype)


def _heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[tokens, key_heads, K]`` of length 1, for each head of the values."""
    x = x.float()
    one: torch.Tensor = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return one.repeat_interleave(group, 1)


def _bounds(kernel: str, cu_seqlens: torch.Tensor, slots: torch.Tensor, tokens: int) -> list[int]:
    """Where the requests' tokens begin, and where the last one's end."""
    found: list[int] = cu_seqlens.tolist()
    fits = len(found) == len(slots) + 1 and found[0] == 0 and found[-1] <= tokens
    if not fits or found != sorted(found):
        raise ValueError(
            f"the CPU engine's {kernel}: got cu_seqlens={found}, expected {len(slots) + 1} numbers "
            f"that rise from 0 to no more than {tokens}, the tokens that there are."
        )
    return found


def _checked(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    states: torch.Tensor,
    to_length_one: bool,
) -> None:
    if not to_length_one:
        raise NotImplementedError(
            f"the CPU engine's {kernel}: got use_qk_l2norm_in_kernel=False, expected True, as "
            "Qwen3-Next gives it."
        )
    if q.dim() != 4 or v.dim() != 4 or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"the CPU engine's {kernel}: got q, k and v with shapes {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)} in {q.dtype}, {k.dtype} and {v.dtype}, "
            "expected [1, tokens, heads, dim], all of one dtype."
        )
    _expect(kernel, {"k": k}, *q.shape)
    _expect(kernel, {"v": v}, 1, q.shape[1], *v.shape[2:])
    _expect(kernel, {"the states": states}, len(states), *v.shape[2:], q.shape[3])
    if v.shape[2] % q.shape[2]:
        raise ValueError(
            f"the CPU engine's {kernel}: got {v.shape[2]} heads of values, expected a multiple of "
            f"{q.shape[2]}, the heads of keys."
        )


def _expect(kernel: str, tensors: dict[str, torch.Tensor], *shape: int) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(
                f"the CPU engine's {kernel}: got {name} with the shape {tuple(tensor.shape)}, "
                f"expected {shape}."
            )
