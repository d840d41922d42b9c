"""SGLang's own figures of the size of its prefix cache. To ask for them waits for no device."""

from __future__ import annotations

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """How many tokens of a pool the prefix cache says that it has: those that it may evict, and
    those that somebody has locked."""

    evictable: int
    protected: int


def innermost(tree: Any) -> Any:
    """The prefix cache itself: a StreamingSession may be wrapped around it."""
    return getattr(tree, "inner", tree)


def core(tree: Any) -> Any:
    """The part of a prefix cache that has the nodes."""
    return getattr(tree, "tree_core", tree)


def root(tree: Any) -> Any:
    """The root of a tree in Python; None where there is no tree, or it is not in Python."""
    try:
        return getattr(core(tree), "root_node", None)
    except NotImplementedError:  # the tree in Rust
        return None


def is_native(tree: Any) -> bool:
    """True if the tree is not in Python: it lists its slots, and shows no nodes."""
    return hasattr(tree, "tree_core") and root(tree) is None


def sizes(tree: Any, pool: str, hybrid: bool) -> Sizes | None:
    """The tree's own count of its size in a pool; None if it is no tree.

    pool: "full" or "swa". hybrid: there are both.
    """
    if not is_native(tree) and root(tree) is None:
        return None
    prefix = f"{pool}_" if hybrid else ""
    return Sizes(
        int(getattr(tree, f"{prefix}evictable_size")()),
        int(getattr(tree, f"{prefix}protected_size")()),
    )
