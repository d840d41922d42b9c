"""Gives a FROZEN_KV_MTP draft the target's whole embedding table, and not this rank's rows of it.

The Gemma-4 assistant looks token ids up in the target's table, with ``F.embedding``
(``gemma4_mtp.py:234``). It gets the table from ``get_embed_and_head`` of the target. Of the
text-only ``Gemma4ForCausalLM`` this returns ``_shard_weight(embed_tokens.weight)``
(``gemma4_causal.py:1105`` and ``:1122``), the rows of this tensor-parallel rank, which suits an
EAGLE3 draft: its ``VocabParallelEmbedding`` knows which rows it has. The assistant does not. With
``--tp-size 2`` an id of the upper half of the vocabulary is out of range on both ranks: an
IndexError on a CPU, a device-side assert on a GPU. An id of the lower half gets the embedding of
another token on rank 1, so the two ranks draft different tokens.

``Gemma4ForConditionalGeneration`` returns the whole table. 0.5.23 asks what the draft's embedding
is, and gives the assistant the whole table, too.

With the fix, a shard remembers the table that it was cut from, and the assistant is bound to that
one. EAGLE3 drafts get their shard as before. With one rank the "shard" is the table itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, after, around
from g4debug.fixes.source import exists, source

ID = "draft-embedding-shard"
TARGET = "sglang.srt.models.gemma4_causal.Gemma4ForCausalLM"
_WHOLE = "_g4debug_whole"


def after_get(result: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs after ``Gemma4ForCausalLM.get_embed_and_head``: the shard remembers its table.

    result: (embedding, head), [rows of this rank, hidden] each.
    """
    embed, _ = result
    table = model.model.embed_tokens.weight
    if embed is not table and embed.shape[0] < table.shape[0]:
        setattr(embed, _WHOLE, table)
    return result


def around_bind(call_next: Callable[..., Any], draft: Any, embed: Any, head: Any) -> Any:
    """Wraps ``Gemma4AssistantForCausalLM.set_embed_and_head``."""
    return call_next(draft, getattr(embed, _WHOLE, embed), head)


def still_broken() -> bool:
    """True if the text-only target returns its rank's rows whatever the draft looks up in them."""
    if not exists(f"{TARGET}._shard_weight"):
        return False
    return "self._shard_weight(self.model.embed_tokens.weight)" in source(
        f"{TARGET}.get_embed_and_head"
    )


FIX = Fix(
    id=ID,
    title="a FROZEN_KV_MTP draft looks tokens up in the whole embedding table, on every rank",
    seed="none; found with two GPUs",
    upstream="none known; 0.5.23 does not have the bug, it asks what the draft's embedding is",
    needs=">=0.5.12,<0.5.23",
    elsewhere={">=0.5.23": "SGLang gives the draft the whole table there"},
    still_broken=still_broken,
    hooks=(
        after("model.embed_and_head", after_get),
        around("draft.bind_embedding", around_bind),
    ),
    purpose="correctness",
)
