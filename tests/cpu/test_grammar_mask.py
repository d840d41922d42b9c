"""The grammar's stand-in, in place of SGLang's method, against the meaning of the mask."""

from __future__ import annotations

import torch


def test_only_allowed_tokens_keep_their_logits(sglang):
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    vocab = 100
    allowed = torch.rand(3, vocab) < 0.3
    mask = torch.zeros(3, -(-vocab // 32), dtype=torch.int32)
    for row, token in allowed.nonzero().tolist():
        bit = 1 << (token % 32)
        mask[row, token // 32] |= bit - (1 << 32) if bit == 1 << 31 else bit
    logits = torch.randn(3, vocab)
    expected = torch.where(allowed, logits, float("-inf"))
    XGrammarGrammar.apply_vocab_mask(None, logits, mask)
    assert torch.equal(logits, expected)
