"""The inputs of the next draft layer (`rotate_input_ids_cpu`, of multi-layer EAGLE).

A draft layer reads at each position the token that follows there. So the inputs of a request move
one place to the left from one layer to the next, and the token that this layer has drafted is put
behind the last one that counts. The inputs of all requests lie one behind the other:

    for request b with s = starts[b], n = lens[b]:
        ids[s + i] = ids[s + i + 1]  for  i < n - 1
        ids[select[b] if there is a select, else s + n - 1] = tokens[b]

In a verify that accepts fewer tokens than it was given, `select` is the place of the last accepted
one. `ids` is changed in place. Shapes: ids `[tokens]`; starts, lens and select `[bs]`; tokens
`[bs]`, or `[bs, 1]` as a draft with one path has them. A request with n = 0 has no inputs.
"""

from __future__ import annotations

import torch


def rotate(
    ids: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    tokens: torch.Tensor,
    select: torch.Tensor | None = None,
) -> None:
    bs = len(lens)
    if tokens.numel() != bs:
        raise NotImplementedError(
            f"sgl_kernel.rotate_input_ids_cpu: got {tokens.numel()} tokens for {bs} requests, "
            "expected one for each, because the CPU engine has no stand-in for a draft with "
            "several paths here. Use speculative_eagle_topk=1."
        )
    given = tokens.reshape(-1).to(ids.dtype)
    last = starts + lens - 1 if select is None else select
    for b, (start, count) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        if count > 0:
            ids[start : start + count - 1] = ids[start + 1 : start + count].clone()
            ids[int(last[b])] = given[b]
