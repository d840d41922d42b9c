"""Attention over lists of token indices (the kernels of SGLang's Triton attention backend).

Row b reads the KV of ``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``, which are rows of the KV
buffers, in the order of their positions. In a decode these are all its keys, and it has one query.
In an extend they are its prefix of length p; its n queries, from ``qo_indptr[b]`` on, also see each
other's keys, which are given apart::

    query i sees prefix key j     if the mask says so, and i + p <= j + W in a sliding layer
    query i sees extended key j   if the mask says so (else j <= i, if causal), and i <= j + W

The mask is a verify's mask: for row b, from ``mask_indptr[b]`` on, one line for each query, of
``window_kv_offsets[b] + p + n`` cells. The prefix is not masked if ``skip_prefix_custom_mask``.
W is the window. With ``s = scale * <q, k>``, capped by ``logit_cap * tanh(s / logit_cap)``, the
output is ``softmax(s) V``, with `sinks` as in `paged_attention`. Heads are grouped: query head h
reads KV head h // (q_heads / kv_heads).

Shapes: q, o ``[tokens, q_heads, dim]``; k_extend, v_extend ``[tokens, kv_heads, dim]``; the buffers
``[slots, kv_heads, dim]``. V may have another dim than K. In a prefill of MLA without a prefix the
buffers, which hold compressed KV and are not read, have other heads and dims. ``o`` is written in
place. All is computed in float32. The stand-ins are needed because SGLang's own kernels take
minutes in Triton's interpreter; a test compares them with those kernels there.

An index outside of the buffer is a device fault and not an exception (see `fault`), and the output
of that row is zeros.
"""

from __future__ import annotations

import torch

from g4debug.cpu import fault
from g4debug.cpu.paged_attention import refuse, weights


def decode_attention_fwd(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    attn_logits: torch.Tensor,
    attn_lse: torch.Tensor,
    num_kv_splits: torch.Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    xai_temperature_len: float = -1,
    has_mla: bool = False,
    use_pdl: bool = False,
    **options: object,
) -> None:
    """One query for each row. attn_logits, attn_lse, num_kv_splits: the kernel's scratch memory.

    has_mla: v_buffer is the beginning of k_buffer, so that the kernel need not read it, too.
    """
    _refuse("decode_attention_fwd", options, xai=xai_temperature_len > 0)
    bounds, group = kv_indptr.tolist(), q.shape[1] // k_buffer.shape[1]
    for b in range(q.shape[0]):
        o[b].zero_()
        slots = slots_of("decode_attention_fwd", kv_indices, bounds, b, k_buffer)
        if slots is None or not len(slots):
            continue
        out = _attend(
            q[b : b + 1], k_buffer[slots].float() * k_scale, v_buffer[slots].float() * v_scale,
            sm_scale, logit_cap, None, group, sinks,
        )  # fmt: skip
        o[b : b + 1] = out.to(o.dtype)


def extend_attention_fwd(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True,
    sliding_window_size: int = -1,
    sinks: torch.Tensor | None = None,
    window_kv_offsets: torch.Tensor | None = None,
    xai_temperature_len: float = -1,
    **options: object,
) -> None:
    """Prefill, draft extend and verify: rows with as many queries as tokens that are new."""
    _refuse("extend_attention_fwd", options, xai=xai_temperature_len > 0)
    begins, bounds = qo_indptr.tolist(), kv_indptr.tolist()
    group = q_extend.shape[1] // k_extend.shape[1]
    scale = q_extend.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    for b in range(len(begins) - 1):
        first, end = begins[b], begins[b + 1]
        if end <= first:
            continue
        o_extend[first:end].zero_()
        slots = slots_of("extend_attention_fwd", kv_indices, bounds, b, k_buffer)
        if slots is None:
            continue
        prefix, queries = len(slots), end - first
        seen = _seen(prefix, queries, is_causal, sliding_window_size)
        if custom_mask is not None and mask_indptr is not None:
            sliding = sliding_window_size > 0 and window_kv_offsets is not None
            offset = int(window_kv_offsets[b]) if sliding else 0  # type: ignore[index]
            line, at = offset + prefix + queries, int(mask_indptr[b])
            mask = custom_mask[at : at + queries * line].view(queries, line)[:, offset:].bool()
            window = _seen(prefix, queries, False, sliding_window_size)
            if skip_prefix_custom_mask:
                mask = torch.cat((mask.new_ones(queries, prefix), mask[:, prefix:]), 1)
            seen = window & mask
        keys, values = k_extend[first:end].float(), v_extend[first:end].float()
        if prefix:
            keys = torch.cat((k_buffer[slots].float() * k_scale, keys))
            values = torch.cat((v_buffer[slots].float() * v_scale, values))
        out = _attend(q_extend[first:end], keys, values, scale, logit_cap, seen, group, sinks)
        o_extend[first:end] = out.to(o_extend.dtype)


def extend_attention_fwd_unified(*args: object, **kwargs: object) -> None:
    """SGLang calls it for deterministic inference only."""
    raise NotImplementedError(
        "the CPU engine has no stand-in for extend_attention_fwd_unified, which SGLang calls for "
        "deterministic inference: start without --enable-deterministic-inference, or extend "
        "g4debug/cpu/token_attention.py."
    )


def _refuse(kernel: str, options: dict[str, object], **named: object) -> None:
    """NotImplementedError for what no toy model uses."""
    # 0.5.23 says how long a page is, and how long the rows are, for kernels that use it.
    harmless = {"page_size", "extend_seq_lens_cpu", "enable_lean", "uneven_batch"}
    given = {k: v for k, v in options.items() if k not in harmless and not k.startswith("lean_")}
    refuse(kernel, {**given, **named})


def slots_of(
    kernel: str, indices: torch.Tensor | None, bounds: list[int], row: int, buffer: torch.Tensor
) -> torch.Tensor | None:
    """The rows of the buffer that a row reads; None after a device fault."""
    begin, end = bounds[row], bounds[row + 1]
    if indices is None:  # an EAGLE draft has no lists for sliding layers before 0.5.23
        if end > begin:
            raise TypeError(f"{kernel}: row {row} has {end - begin} entries, but there is no list")
        return torch.empty(0, dtype=torch.int64)
    found = indices[begin:end].to(torch.int64)
    bad = ((found < 0) | (found >= buffer.shape[0])).nonzero()
    if begin < 0 or end > len(indices):  # it reads past the list, which is as illegal
        at, value = max(0, len(indices) - begin), -1
    elif len(bad):
        at, value = int(bad[0]), int(found[bad[0]])
    else:
        return found
    fault.record(fault.DeviceFault(kernel, row, at, value, buffer.shape[0], -1, "token"))
    return None


def _seen(prefix: int, queries: int, causal: bool, window: int) -> torch.Tensor:
    """Which keys each query sees, bool ``[queries, prefix + queries]``."""
    position = torch.arange(prefix, prefix + queries)[:, None]
    key = torch.arange(prefix + queries)[None]
    seen = torch.ones(queries, prefix + queries, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window > 0:
        seen &= position <= key + window
    return seen


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    cap: float,
    seen: torch.Tensor | None,
    group: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``[queries, q_heads, dim]`` in float32."""
    queries, kv_heads = q.shape[0], keys.shape[1]
    grouped = q.float().view(queries, kv_heads, group, -1).permute(1, 2, 0, 3)
    scores = grouped @ keys.permute(1, 2, 0)[:, None] * scale  # [kv_heads, group, queries, keys]
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    out = weights(scores, sinks).nan_to_num(0.0) @ values.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).flatten(1, 2)
