"""Reads SGLang's prefix cache: its nodes, their pages, and its own counts.

A prefix cache is a tree. Each node has a key, which is a part of a prompt, and a value, which is
the slots of the full pool that hold the KV of these tokens. On a model with sliding layers a node
may have lost its SWA pages; then it is a *tombstone*. The full pages of a tombstone may still be
named by ``full_to_swa_index_mapping``, but a SWA page that only a tombstone leads to is owned by
nobody.

Known are the trees that SGLang has in Python (``RadixCache``, ``SWARadixCache``,
``UnifiedRadixCache``), and the one in Rust behind the last, which lists its slots itself.
Everything here but :func:`path` waits for the device. SGLang's own figures of the cache's size are
in :mod:`g4debug.hooking.cache_sizes`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from g4debug.hooking.cache_sizes import Sizes as Sizes
from g4debug.hooking.cache_sizes import core, is_native, root
from g4debug.hooking.cache_sizes import innermost as innermost
from g4debug.hooking.cache_sizes import sizes as sizes
from g4debug.ledger.books import Pages, on_host
from g4debug.ledger.holders import NODES

_NONE: Pages = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Cached:
    """The slots that the nodes hold: int64 slots of the full pool, node by node. A slot that two
    nodes hold is there twice.

    full: the slots of all nodes. alive: the slots of the nodes that are no tombstones.
    swa_tokens: how many tokens have a SWA page.
    """

    full: Pages
    alive: Pages
    swa_tokens: int


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


def read(tree: Any) -> Generator[None, None, Cached]:
    """Read all nodes, with a pause after every ``NODES`` of them. A chunk cache has none."""
    if is_native(tree):
        full = on_host(tree.all_values_flatten())
        yield
        alive = on_host(core(tree).walk_for_kv_canary(False, True).slot_indices)
        return Cached(full, alive, len(alive))
    top = root(tree)
    values: list[torch.Tensor] = []
    flags: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
    swa_tokens = 0
    found_full: list[Pages] = []
    found_alive: list[Pages] = []
    stack = list(top.children.values()) if top is not None else []
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        value, swa = value_of(node), swa_tokens_of(node)
        swa_tokens += swa
        if value is not None and len(value):
            values.append(value)
            flags.append(np.full(len(value), swa > 0))
        if len(values) >= NODES or (values and not stack):
            slots, alive = on_host(torch.cat(values)), np.concatenate(flags)
            found_full.append(slots)
            found_alive.append(slots[alive])
            values.clear()
            flags.clear()
            yield
    full = np.concatenate([_NONE, *found_full])
    return Cached(full, np.concatenate([_NONE, *found_alive]), swa_tokens)


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


def locked(tree: Any, pool: str) -> Pages:
    """The full slots of the nodes that are locked in a pool. On an idle server that is nobody's."""
    if is_native(tree):
        native, swa = core(tree), pool == "swa"
        every = on_host(native.walk_for_kv_canary(False, swa).slot_indices)
        return np.setdiff1d(every, on_host(native.walk_for_kv_canary(True, swa).slot_indices))
    values = [value_of(node) for node in nodes(tree) if _is_locked(node, pool)]
    values = [value for value in values if value is not None and len(value)]
    return on_host(torch.cat(values)) if values else _NONE


def _is_locked(node: Any, pool: str) -> bool:
    data = getattr(node, "component_data", None)
    if data is not None:
        return bool(data[0 if pool == "full" else 1].lock_ref)
    return bool(getattr(node, f"{pool}_lock_ref", getattr(node, "lock_ref", 0)))


def nodes(tree: Any) -> Iterator[Any]:
    """All nodes of a tree in Python but its root, parents first."""
    top = root(tree)
    stack = list(top.children.values()) if top is not None else []
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


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
    its full pages, and SWA pages for a window. Does not wait. node: as of :func:`path`.
    """
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
        if value is not None and not _is_locked(node, "full"):
            full += len(value)
        if covered < window and not _is_locked(node, "swa"):
            swa += swa_tokens_of(node)
        covered += len(node.key)
        node = node.parent
    return Unlocked(full, swa)
