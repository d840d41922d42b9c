"""Puts a token of a free page into a list of tokens: its KV may be overwritten at any time."""

from __future__ import annotations

import random
from typing import Any

from g4debug.faults import lists


def freed(of: lists.Lists, it: lists.TokenList, draw: random.Random) -> lists.Change | None:
    pages, size = free_pages(of.backend.token_to_kv_pool_allocator, it.name)
    return lists.put(it, it.end - 1, draw.choice(pages) * size) if pages else None


def free_pages(allocator: Any, name: str) -> tuple[list[int], int]:
    """(pages of the list's pool that are free, tokens of a page). name: "full" or "window"."""
    inner = "swa_attn_allocator" if name == "window" else "full_attn_allocator"
    one = getattr(allocator, inner, allocator)
    pages = [int(page) for page in one.free_pages[:64].tolist()]
    return [page for page in pages if page > 0], int(one.page_size)


FAULT, install = lists.declare(
    "token-freed", "the last entry of a list of tokens gets a token of a free page", freed
)
