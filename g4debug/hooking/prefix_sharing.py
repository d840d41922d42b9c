"""Whether SGLang's prefix cache keeps prefixes: what it has in the place of one does not."""

from __future__ import annotations

from typing import Any


def keeps_prefixes(tree_cache: Any) -> bool:
    """True if it keeps them, and requests share them. 0.5.23 asks for that by another name."""
    if hasattr(tree_cache, "supports_prefix_sharing"):
        return bool(tree_cache.supports_prefix_sharing())
    return not tree_cache.is_chunk_cache()
