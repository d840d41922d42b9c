"""Picks each request's bonus token after a verify (`sgl_kernel.fill_bonus_tokens_cpu`).

    bonus[i] = accepted[i * stride + lengths[i] - 1]

Shapes: accepted `[bs * stride]` int (the accepted tokens of each request, then padding), lengths
`[bs]` int (accepted tokens, the bonus token among them, so at least 1), bonus `[bs]` int, written
in place. It is needed because SGLang's branch for a CPU calls a kernel that is not installed.
"""

from __future__ import annotations

import torch


def fill(accepted: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int) -> None:
    last = torch.arange(len(lengths), device=lengths.device) * stride + lengths.long() - 1
    bonus.copy_(accepted.reshape(-1)[last].to(bonus))
