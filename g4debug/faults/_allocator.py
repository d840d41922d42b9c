"""Shared by the faults of the allocator: which allocator a caller has, and when a page is taken.

SGLang's callers have one allocator: the SWA allocator, which has an inner allocator for each pool,
or a plain one. A caller's fault (such as "frees twice") uses the public methods of that allocator,
so that whoever watches the pools sees what it leads to. An allocator's fault (such as "hands out
page 0") corrupts the free list of a pool, right before a page is taken from it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Hook, Injection, Put
from g4debug.hooking import targets
from g4debug.hooking.arguments import argument

if TYPE_CHECKING:
    import torch

ALLOC = ("alloc", "alloc_extend", "alloc_decode")
# How callers free tokens. From 0.5.18 on, consecutive tokens of a row have a way of their own.
FREE = ("free", "free_segment")


class Allocators:
    """The allocators of this process, and the forward mode that the scheduler prepares or runs."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.mode = ""  # the batch's ForwardMode in lower case
        self._inner: dict[int, str] = {}  # id() of an inner allocator -> its pool
        self._put("after", "swa.init", self._after_swa_init)
        self._put("before", "batch.prepare_for_extend", lambda *a, **k: self._set("extend"))
        self._put("before", "batch.prepare_for_decode", lambda *a, **k: self._set("decode"))
        self._put("before", "scheduler.run_batch", self._before_run)

    def _put(self, how: str, site: str, hook: Callable[..., Any]) -> None:
        for part in (site, f"{site}.token"):  # page size 1 has another allocator class
            if part in targets.SITES:
                getattr(self.injection, how)(part, optional=True)(hook)

    def _after_swa_init(self, result: Any, allocator: Any, *args: Any, **kwargs: Any) -> Any:
        self._inner[id(allocator.full_attn_allocator)] = "full"
        self._inner[id(allocator.swa_attn_allocator)] = "swa"
        return result

    def _set(self, mode: str) -> None:
        self.mode = mode

    def _before_run(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self.mode = batch.forward_mode.name.lower() if batch.forward_mode else ""

    # --- where a fault acts -------------------------------------------------------------------

    def around_callers(self, *methods: str) -> Put:
        """Put ``wrapper(call_next, allocator, *args)`` around methods that callers use."""

        def put(wrapper: Hook) -> Hook:
            def of_plain(call_next: Callable[..., Any], allocator: Any, *a: Any, **k: Any) -> Any:
                if id(allocator) in self._inner:
                    return call_next(allocator, *a, **k)
                return wrapper(call_next, allocator, *a, **k)

            for method in methods:
                self._put("around", f"swa.{method}", wrapper)
                self._put("around", f"pool.{method}", of_plain)
            return wrapper

        return put

    def around_frees(self, wrapper: Hook) -> Hook:
        """Put ``wrapper(call_next, allocator, free_index, **kwargs)`` around all that callers free.

        A call that SGLang repeats at the end of a free group passes the wrapper by.
        """

        @self.around_callers(*FREE)
        def real(call_next: Callable[..., Any], allocator: Any, free_index: Any, **k: Any) -> Any:
            # From 0.5.21 on a free group defers what comes of a call, and not the call.
            final = getattr(allocator, "is_not_in_free_group", True)
            if not final or not free_index.numel():
                return call_next(allocator, free_index, **k)
            return wrapper(call_next, allocator, free_index, **k)

        return wrapper

    def before_page(self, pool: str) -> Put:
        """Call ``act(allocator)`` right before the first free page of a pool is taken."""

        def put(act: Hook) -> Hook:
            def before(method: str, allocator: Any, *args: Any, **kwargs: Any) -> None:
                mine = self.pool_of(allocator) == pool and len(allocator.free_pages)
                if mine and takes_a_page(method, allocator.page_size, args, kwargs):
                    act(allocator)

            for method in ALLOC:
                self._put("before", f"pool.{method}", partial(before, method))
            return act

        return put

    def pool_of(self, allocator: Any) -> str:
        return self._inner.get(id(allocator), "full")


def takes_a_page(method: str, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an allocation with these arguments (after self) needs a new page."""
    if method == "alloc":
        return bool(argument(args, kwargs, 0, "need_size") >= size)
    if method == "alloc_decode":
        return bool(((argument(args, kwargs, 1, "seq_lens_cpu") - 1) % size == 0).any())
    prefix = argument(args, kwargs, 1, "prefix_lens_cpu")
    lengths = argument(args, kwargs, 3, "seq_lens_cpu")
    return bool(((lengths + size - 1) // size > (prefix + size - 1) // size).any())


def corrupt_free_list(allocator: Any, page: int) -> int:
    """Replace the page that would be handed out next. Returns the page that is thereby lost."""
    lost = int(allocator.free_pages[0])
    allocator.free_pages = (
        allocator.free_pages.clone()
    )  # a state that SGLang backed up shares the tensor
    allocator.free_pages[0] = page
    return lost


def free_list(allocator: Any) -> torch.Tensor:
    """The free pages of one pool: int64 [n]."""
    import torch

    staged = getattr(allocator, "staged_pages", None) or ()  # from 0.5.21 on
    lists = (allocator.free_pages, getattr(allocator, "release_pages", None), *staged)
    return torch.cat([pages for pages in lists if pages is not None])


def part(allocator: Any, pool: str) -> Any:
    """The allocator of one pool; a plain allocator is returned as it is."""
    return getattr(allocator, f"{pool}_attn_allocator", allocator)


def pages(indices: torch.Tensor, page_size: int) -> list[int]:
    """The pages of token indices, sorted. This waits for the device."""
    import torch

    found: list[int] = torch.unique(indices // page_size).tolist()
    return found


def named(found: list[int]) -> str:
    text = ", ".join(str(p) for p in found[:8])
    return f"page{'s' * (len(found) != 1)} {text}{', ...' if len(found) > 8 else ''}"
