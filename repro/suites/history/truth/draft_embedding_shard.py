"""Counts the drafts that look token ids up in a part of the embedding.

0.5.23 mends it: ``Gemma4ForCausalLM.get_embed_and_head`` asks which group of ranks the draft's own
embedding is cut for, and gives the assistant the whole table. Without it the table has fewer rows
than the vocabulary has tokens.
"""

from __future__ import annotations

from typing import Any

from suites.history.counter import Counter, around


def install(counter: Counter) -> None:
    from sglang.srt.models.gemma4_mtp import Gemma4AssistantForCausalLM

    @around(Gemma4AssistantForCausalLM, "forward")
    def forward(
        model: Any, ids: Any, positions: Any, batch: Any, embeds: Any = None, **_: Any
    ) -> None:
        if embeds is not None or model.target_embed_weight is None:
            return
        counter.reached()
        config = getattr(model.config, "text_config", model.config)
        rows, tokens = model.target_embed_weight.shape[0], config.vocab_size
        if rows < tokens:
            counter.triggered(f"ids up to {tokens - 1} are looked up in {rows} rows")
