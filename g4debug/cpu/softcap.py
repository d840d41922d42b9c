"""Soft-caps the logits: `y = c * tanh(x / c)`.

Shapes: logits `[n, vocab]` of any float dtype, computed in float32 and written in place. It is
needed because SGLang's Triton kernel calls CUDA's `libdevice.tanh`, which does not exist under
`TRITON_INTERPRET`. Source of the idea: Gemma 2 report, `final_logit_softcapping`.
"""

from __future__ import annotations

import torch


def softcap_in_place(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Replace `logits` by `cap * tanh(logits / cap)` and return the same tensor."""
    if not cap > 0:
        raise ValueError(f"softcap: got cap={cap!r}, expected a positive number; check config.json")
    return logits.copy_(torch.tanh(logits.float() / cap) * cap)
