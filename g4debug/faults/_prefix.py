"""Shared by the faults of the prefix cache: where it hands pages out, and where it gets them.

Up to 0.5.21 a match hands out slots; from 0.5.23 on it hands out a node, and the slots come when
the request is admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Injection

if TYPE_CHECKING:
    import torch

    Change = Callable[[torch.Tensor, int], torch.Tensor]

FAMILIES = ("radix", "swa", "unified")


def change_handed_out(injection: Injection, change: Change) -> None:
    """Let a request get ``change(slots, page size)`` instead of these slots."""

    def after_match(result: Any, tree: Any, params: Any) -> Any:
        if getattr(params, "req", None) is None:
            return result
        return result._replace(device_indices=change(result.device_indices, tree.page_size))

    def after_prefix(result: torch.Tensor, tree: Any, request: Any) -> torch.Tensor:
        return change(result, tree.page_size)

    for family in FAMILIES:
        injection.after(f"tree.{family}.match", optional=True)(after_match)
    for site in ("tree.prefix", "tree.unified.prefix"):
        injection.after(site, optional=True)(after_prefix)


def change_handed_over(injection: Injection, change: Change) -> None:
    """Let a request hand over ``change(slots, page size)`` instead of these slots."""

    def before_insert(tree: Any, params: Any) -> None:
        if params.value is not None and tree.token_to_kv_pool_allocator is not None:
            params.value = change(params.value, tree.page_size)

    for family in FAMILIES:
        injection.before(f"tree.{family}.insert", optional=True)(before_insert)
