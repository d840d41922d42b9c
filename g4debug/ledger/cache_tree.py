"""Reads SGLang's prefix cache: its nodes, their pages, and its own counts.

A prefix cache is a tree. Each node has a key, which is a part of a prompt, and a value, which is
the slots of the full pool that hold the KV of these tokens. On a model with sliding layers a node
may have lost its SWA pages; then it is a *tombstone*. The full pages of a tombstone may still be
named by ``full_to_swa_index_mapping``, but a SWA page that only a tombstone leads to is owned by
nobody.

Known are the trees that SGLang has in Python (``RadixCache``, ``SWARadixCache``,
``UnifiedRadixCache``), and the one in Rust behind the last, which lists its slots itself.
Everything here waits for the device. What does not is in :mod:`g4debug.hooking.prefix_tree`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from g4debug.hooking.prefix_tree import (
    core,
    is_locked,
    is_native,
    root,
    swa_tokens_of,
    value_of,
)
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


def locked(tree: Any, pool: str) -> Pages:
    """The full slots of the nodes that are locked in a pool. On an idle server that is nobody's."""
    if is_native(tree):
        native, swa = core(tree), pool == "swa"
        every = on_host(native.walk_for_kv_canary(False, swa).slot_indices)
        return np.setdiff1d(every, on_host(native.walk_for_kv_canary(True, swa).slot_indices))
    values = [value_of(node) for node in nodes(tree) if is_locked(node, pool)]
    values = [value for value in values if value is not None and len(value)]
    return on_host(torch.cat(values)) if values else _NONE


def nodes(tree: Any) -> Iterator[Any]:
    """All nodes of a tree in Python but its root, parents first."""
    top = root(tree)
    stack = list(top.children.values()) if top is not None else []
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
