"""What SGLang's prefix cache says of itself without waiting for the device: sizes, paths, locks.

Which slots its nodes hold is read by :mod:`g4debug.ledger.cache_tree`, which explains the trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Sizes(NamedTuple):
    """How many tokens of a pool the prefix cache says that it has: those that it may evict, and
    those that somebody has locked."""

    evictable: int
    protected: int


class Unlocked(NamedTuple):
    """Tokens of each pool that a node and those above it hold, and that nobody has locked.

    exact: if not, it may be fewer.
    """

    full: int
    swa: int
    exact: bool = True


class PathNode(NamedTuple):
    """One node on the way from the root: its id, the tokens ``begin`` to ``end`` - 1 that its key
    has, and how many slots its value has, -1 if it has none."""

    id: int
    begin: int
    end: int
    slots: int


def innermost(tree: Any) -> Any:
    """The prefix cache itself: a StreamingSession may be wrapped around it."""
    return getattr(tree, "inner", tree)


def session_slots(tree: Any) -> Iterator[Any]:
    """The slots of streaming sessions: each may keep a row and its KV between two turns."""
    # A StreamingSession is wrapped around the cache, or is a part of it (from 0.5.18 on).
    for holder in (tree, getattr(tree, "session", None)):
        yield from getattr(holder, "slots", {}).values()


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


def value_of(node: Any) -> Any:
    """The slots of a node in Python, None if it has none on the device."""
    data = getattr(node, "component_data", None)
    return node.value if data is None else data[0].value  # 0 is the component of the full pool


def swa_tokens_of(node: Any) -> int:
    """How many tokens of a node in Python have a SWA page: 0 for a tombstone."""
    data = getattr(node, "component_data", None)
    if data is not None:
        swa = data[1].value  # the component of the SWA pool
        return 0 if swa is None else len(swa)
    if not hasattr(node, "swa_tombstone") or node.swa_tombstone or node.value is None:
        return 0
    return len(node.value)


def is_locked(node: Any, pool: str) -> bool:
    """True if somebody has locked a node in Python, in the full or the SWA pool."""
    return locks_of(node, pool) > 0


def locks_of(node: Any, pool: str) -> int:
    """How often somebody has locked a node in Python, in the full or the SWA pool."""
    data = getattr(node, "component_data", None)
    if data is not None:
        return int(data[0 if pool == "full" else 1].lock_ref)
    return int(getattr(node, f"{pool}_lock_ref", getattr(node, "lock_ref", 0)))


class Locked(NamedTuple):
    """A locked node: its id, its tokens in the pool, and how often it is locked.

    locks: None if the tree does not tell. Then it is a node that a request which has begun locks by
    SGLang's rule, and ``tokens`` are the most that it may have in the pool.
    """

    id: int
    tokens: int
    locks: int | None


def locked_above(tree: Any, node: Any, pool: str) -> list[Locked] | None:
    """The nodes from ``node`` up, without the root, that a request locks whose last one it is.

    None if the tree tells nothing. node: as of :func:`path`. Raises KeyError if it was evicted.
    Does not wait.
    """
    if is_native(tree):
        return _locked_by_rule(tree, node, pool)
    if isinstance(node, int):
        node = core(tree).node_by_id(node)
    found = []
    while node is not None and node.parent is not None:
        value, locks = value_of(node), locks_of(node, pool)
        tokens = swa_tokens_of(node) if pool == "swa" else 0 if value is None else len(value)
        if locks and tokens:
            found.append(Locked(node.id, tokens, locks))
        node = node.parent
    return found


def _locked_by_rule(tree: Any, node: Any, pool: str) -> list[Locked] | None:
    """The same of the tree in Rust, which does not show its locks.

    A request locks all full pages of its prefix, and the nodes with SWA pages that reach one window
    back from the prefix's end.
    """
    if not isinstance(node, int) or not hasattr(core(tree), "collect_path_info"):
        return None
    nodes = [one for one in path(tree, node) if one.slots > 0]
    if pool == "swa" and nodes:
        window, last = getattr(tree, "sliding_window_size", None) or 0, nodes[-1].end
        nodes = [one for one in nodes if last - one.end < window]
    return [Locked(one.id, one.slots, None) for one in reversed(nodes)]


def path(tree: Any, node: Any) -> list[PathNode]:
    """The nodes from the root to ``node``, without the root; [] if the tree does not tell.

    node: a node, or its id where SGLang gives out ids. Does not wait.
    """
    if isinstance(node, int):
        native = core(tree)
        if is_native(tree):
            if not hasattr(native, "collect_path_info"):
                return []
            (infos,) = native.collect_path_info((node,))
            return [
                PathNode(
                    i.node_id, i.path_start, i.path_end,
                    -1 if i.full_value_len is None else i.full_value_len,
                )
                for i in infos
            ]  # fmt: skip
        node = native.node_by_id(node)
    found: list[Any] = []
    while node is not None and node.parent is not None:
        found.append(node)
        node = node.parent
    at, told = 0, []
    for one in reversed(found):
        value = value_of(one)
        end = at + len(one.key)
        told.append(PathNode(one.id, at, end, -1 if value is None else len(value)))
        at = end
    return told


def slots(tree: Any, request: Any) -> torch.Tensor | None:
    """The slots that the nodes from the root to a request's last node have, in their order.

    int64, of the full pool, on their device; None where the tree does not tell. Does not wait.
    """
    node = getattr(request, "last_node", None)
    if node is None:
        return None
    try:
        return _upwards(tree, node, getattr(request, "extra_key", None))
    except Exception:  # this kind of cache has no such path, and Rust has errors of its own
        return None


def _upwards(tree: Any, node: Any, space: Any) -> torch.Tensor | None:
    """node: as of :func:`path`. space: the namespace (``extra_key``) of its prompt."""
    native = core(tree)
    if hasattr(native, "collect_full_device_indices"):
        found = native.collect_full_device_indices(node, tree.root_node_handle(space))
        return found if isinstance(found, torch.Tensor) else None
    if isinstance(node, int):
        if is_native(tree) or not hasattr(native, "node_by_id"):
            return None
        node = native.node_by_id(node)
    values: list[Any] = []
    while node is not None and node.parent is not None:
        values.append(value_of(node))
        node = node.parent
    if not values or any(value is None for value in values):
        return None
    return torch.cat(values[::-1])


def end(tree: Any, node: Any) -> int | None:
    """At which token ``node`` ends, 0 for the root; None if the tree does not tell. Does not wait.

    node: as of :func:`path`.
    """
    if isinstance(node, int) and is_native(tree) and not hasattr(core(tree), "collect_path_info"):
        return None
    nodes = path(tree, node)
    return nodes[-1].end if nodes else 0


def unlocked_above(tree: Any, node: Any) -> Unlocked:
    """How many evictable tokens a lock of ``node`` would take away from each pool.

    SGLang locks the prefix of a request before it asks whether there is room for the rest: all of
    its full pages, and SWA pages for a window. Does not wait. node: as of :func:`path`. One that
    was evicted since has nothing: SGLang matches a waiting request anew before it locks.
    """
    try:
        return _unlocked_above(tree, node)
    except KeyError:  # of SGLang's, in Python and in Rust
        return Unlocked(0, 0, exact=False)


def _unlocked_above(tree: Any, node: Any) -> Unlocked:
    window = getattr(tree, "sliding_window_size", None) or 0
    if node is None or (root(tree) is None and not is_native(tree)):
        return Unlocked(0, 0)  # a chunk cache
    if is_native(tree):  # it does not say which nodes are locked, without waiting for the device
        nodes_ = path(tree, node)
        begins = [one.begin for one in nodes_ if nodes_[-1].end - one.end < window]
        full, swa = tree.full_evictable_size(), tree.swa_evictable_size()
        return Unlocked(
            min(sum(one.slots for one in nodes_ if one.slots > 0), int(full)),
            min(nodes_[-1].end - begins[0] if begins else 0, int(swa)),
            exact=False,
        )
    if isinstance(node, int):
        node = core(tree).node_by_id(node)
    full = swa = covered = 0
    while node is not None and node.parent is not None:
        value = value_of(node)
        if value is not None and not is_locked(node, "full"):
            full += len(value)
        if covered < window and not is_locked(node, "swa"):
            swa += swa_tokens_of(node)
        covered += len(node.key)
        node = node.parent
    return Unlocked(full, swa)
