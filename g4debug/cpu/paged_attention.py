"""Attention over a paged KV cache (FlashInfer's `trtllm_batch_decode/context_with_kv_cache`).

For row b with n = seq_lens[b] tokens in its pages and m queries, which are its last m tokens:

    K = concat of k_cache[block_tables[b, j]] for j < ceil(n / page), cut to n   (V likewise)
    s[i, k] = bmm1_scale * <q_i, K_k>   for  max(0, p_i - window_left) <= k <= p_i,  p_i = n - m + i
    o_i = bmm2_scale * softmax(s_i) V

Heads are grouped: query head h reads KV head h // (q_heads / kv_heads). If window_left < 0, there
is no window. With `sinks` (gpt-oss: one logit for each query head), the softmax of head h has one
more term, exp(sinks[h]), in its denominator: a part of the attention that goes to no key.

Where `out` is given, the result is written into it and `out` is returned, as the kernels do.
`multi_ctas_kv_counter_buffer` is scratch memory of the kernel; the result does not depend on it.

Shapes: query `[tokens, q_heads, dim]`; kv_cache a pair of `[pages, kv_heads, page, dim]` (HND);
block_tables `[bs, columns]` int; seq_lens `[bs]` int; sinks `[q_heads]`; out like query, in
`out_dtype`. All is computed in float32. The stand-ins are needed because both kernels are for CUDA
only. Source of the idea: PagedAttention (Kwon et al., 2023).

If a cell that the kernel would dereference has a page outside the cache, that is a device fault and
not an exception (see `fault`), and the output of that row is zeros. Cells past the row's length, or
before the first page of the window, are never read, as on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from g4debug.cpu import fault


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out_dtype: torch.dtype | None = None,
    q_len_per_req: int | None = 1,
    out: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """Each row has the same number of queries: 1 in a decode, the draft tokens in a verify."""
    refuse("attention", options)
    step = q_len_per_req or 1
    starts = [step * i for i in range(block_tables.shape[0] + 1)]
    return attend(
        "trtllm_batch_decode_with_kv_cache", query, kv_cache, block_tables, seq_lens, starts,
        float(bmm1_scale), float(bmm2_scale), window_left, out_dtype, out,
        sinks,
    )  # fmt: skip


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """A prefill: the queries of row b are `query[cum_seq_lens_q[b] : cum_seq_lens_q[b + 1]]`."""
    refuse("attention", {**options, "causal=False": not causal})
    return attend(
        "trtllm_batch_context_with_kv_cache", query, kv_cache, block_tables, seq_lens,
        cum_seq_lens_q.tolist(), float(bmm1_scale), float(bmm2_scale), window_left, out_dtype, out,
        sinks,
    )  # fmt: skip


def refuse(kernel: str, options: Mapping[str, object]) -> None:
    """Raise NotImplementedError for what no toy model uses: a value but None and False."""
    for name, value in options.items():
        if value is not None and value is not False:
            got = name if value is True else f"{name}={value!r}"
            raise NotImplementedError(
                f"the CPU engine's {kernel}: got {got}, expected its default, because none of its "
                "toy models uses it; unset it, or extend the stand-ins in g4debug/cpu."
            )


def live_columns(tokens: int, queries: int, page: int, window_left: int) -> range:
    """The columns of a block-table row that the kernel dereferences."""
    first_key = max(0, tokens - queries - window_left) if window_left >= 0 else 0
    return range(first_key // page, -(-tokens // page))


def attend(
    kernel: str,
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: list[int],
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    num_pages, _, page, _ = kv_cache[0].shape
    shape = (*query.shape[:2], kv_cache[1].shape[-1])
    if out is None:
        out = torch.zeros(shape, dtype=out_dtype or query.dtype, device=query.device)
    elif tuple(out.shape) != shape or out_dtype not in (None, out.dtype):
        raise ValueError(
            f"{kernel}: got out of shape {tuple(out.shape)} and {out.dtype}, expected {shape} and "
            f"{out_dtype or out.dtype}. SGLang makes this tensor: the CPU engine does not know "
            "how this release calls the kernel, so extend g4debug/cpu/paged_attention.py."
        )
    else:
        out.zero_()
    table = block_tables.tolist()
    for b, tokens in enumerate(seq_lens.tolist()):
        begin, end = starts[b], starts[b + 1]
        queries = end - begin
        if queries <= 0 or tokens <= 0:
            continue
        columns = live_columns(tokens, queries, page, window_left)
        bad = first_bad(table[b], columns, num_pages)
        if bad is not None:
            column, value = bad
            fault.record(fault.DeviceFault(kernel, b, column, value, num_pages, window_left))
            continue
        attend_row(
            out[begin:end], query[begin:end], kv_cache, table[b][columns.start : columns.stop],
            columns.start * page, tokens, bmm1_scale, bmm2_scale, window_left,
            sinks,
        )  # fmt: skip
    return out


def attend_row(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    pages: list[int],
    first: int,
    tokens: int,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    sinks: torch.Tensor | None,
) -> None:
    """Attend for one request. out, query: [queries, heads, dim]. first: the position of the first
    key, which begins ``pages``. tokens: the length of the sequence.
    """
    k_cache, v_cache = kv_cache
    queries, kv_heads = len(query), k_cache.shape[1]
    group = query.shape[1] // kv_heads
    keys = _gather(k_cache, pages, tokens - first)
    values = _gather(v_cache, pages, tokens - first)
    q = query.float().view(queries, kv_heads, group, -1).permute(1, 2, 0, 3)
    scores = (q @ keys.mT.unsqueeze(1)).mul_(bmm1_scale)  # [kv_heads, group, queries, keys]
    hidden = _hidden(tokens, queries, first, window_left)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    o = (weights(scores, sinks) @ values.unsqueeze(1)).mul_(bmm2_scale)
    out.copy_(o.permute(2, 0, 1, 3).flatten(1, 2))


def weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax over the last dimension of ``[kv_heads, group, queries, keys]``.

    sinks: `[kv_heads * group]`; each takes its share of a query, so that the weights sum to less
    than 1.
    """
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def first_bad(row: list[int], columns: range, num_pages: int) -> tuple[int, int] | None:
    for column in columns:
        # With too short a row the kernel reads past the table, which is as illegal as a bad page.
        value = row[column] if column < len(row) else -1
        if not 0 <= value < num_pages:
            return column, value
    return None


def _gather(cache: torch.Tensor, pages: list[int], tokens: int) -> torch.Tensor:
    """`[kv_heads, tokens, dim]` in float32."""
    rows = cache[torch.tensor(pages, device=cache.device)].float()
    return rows.transpose(0, 1).flatten(1, 2)[:, :tokens]


def _hidden(tokens: int, queries: int, first: int, window_left: int) -> torch.Tensor | None:
    """Which keys (from position `first` on) each query must not see; None if it sees all."""
    if queries == 1 and (window_left < 0 or first >= tokens - 1 - window_left):
        return None
    position = torch.arange(tokens - queries, tokens)[:, None]
    key = torch.arange(first, tokens)[None]
    hidden = key > position
    if window_left >= 0:
        hidden |= key < position - window_left
    return hidden
