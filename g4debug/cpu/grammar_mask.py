"""Masks the logits of tokens that a grammar forbids (`XGrammarGrammar.apply_vocab_mask`).

Shapes: logits `[rows, vocab]` float, written in place with -inf; mask `[rows, ceil(vocab / 32)]`
int32, one bit for each token, 1 where the token is allowed. It is needed because SGLang's method
raises on a CPU. xgrammar itself has a kernel for CPUs, which is called here.
"""

from __future__ import annotations

from typing import Any

import torch


def apply_vocab_mask(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Mask in place. `vocab_mask` has a row for each row of `logits`."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)
