"""The buffers of a KV pool, by what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# A pool's fields with one tensor for each layer. With MLA, K and V are one vector of a token.
PARTS = {"k_buffer": "K", "v_buffer": "V", "kv_buffer": "KV"}


def buffers_of(pool: Any) -> Mapping[str, list[torch.Tensor]]:
    """ "K" and "V", or "KV" -> a tensor [slots, heads, dim] for each layer. {} without any."""
    found = {part: getattr(pool, field, None) for field, part in PARTS.items()}
    return {part: list(layers) for part, layers in found.items() if isinstance(layers, list)}
