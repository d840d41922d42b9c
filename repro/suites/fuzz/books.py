"""What of the host's books can be corrupted: lengths, rows and tokens, as Python numbers.

SGLang keeps them in requests, in the batch and in its pools. Kernels never see most of them, but
they decide which KV pages a request gets, gives back, and hands to the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from g4debug.hooking import req_kv
from suites.fuzz.places import Place

Values = Callable[[int], dict[str, int]]


class Books:
    """A part of ``strike.Strike``: one method for each name in ``corruption.BOOKS``."""

    scheduler: Any
    live: Callable[[], list[tuple[Any, int, int]]]
    one: Callable[[], tuple[Any, int, int] | None]
    values: Callable[..., dict[str, int]]
    inner: Callable[[str], Any]
    case: Any

    @property
    def page(self) -> int:
        return int(self.scheduler.token_to_kv_pool_allocator.page_size)

    def _lengths(self, **of: Any) -> Iterator[Place]:
        """The lengths that a request keeps of its own KV."""
        if (one := self.one()) is None:
            return
        request = one[0]
        others = [r for r, _, _ in self.live() if r is not request]
        for name in (req_kv.COMMITTED, req_kv.ALLOCATED, req_kv.EVICTED):
            holder = req_kv.holder(request, name)
            now = getattr(holder, name, None)
            if not isinstance(now, int):
                continue
            values = {"own": now // 2, "freed": max(0, now - self.page)}
            if others:
                values["other"] = int(getattr(req_kv.holder(others[0], name), name, now))
            yield attribute(holder, name, values, f"{name} of {request.rid}", str(request.rid))
        # From 0.5.21 on there is one for each part of a prefix cache.
        evicted = getattr(getattr(request, "kv", None), "component_evicted_seqlens", {})
        for part, now in evicted.items():
            values = {"own": now // 2, "freed": max(0, now - self.page)}
            words = f"{part.name.lower()}_evicted_seqlen of {request.rid}"
            yield _key(evicted, part, values, words, str(request.rid))

    def _host_row(self, **of: Any) -> Iterator[Place]:
        """The row that a request believes to have."""
        if (one := self.one()) is None:
            return
        request, row, _ = one
        free = self.scheduler.req_to_token_pool.free_slots
        values = {"freed": int(free[-1])} if len(free) else {}
        other = next((r for _, r, _ in self.live() if r != row), None)
        if other is not None:
            values["other"] = other
        holder = req_kv.holder(request, req_kv.ROW)
        yield attribute(
            holder, req_kv.ROW, values, f"{req_kv.ROW} of {request.rid}", str(request.rid)
        )

    def _free_rows(self, **of: Any) -> Iterator[Place]:
        """Both ends of the list of free rows: releases take from another one."""
        free, one = self.scheduler.req_to_token_pool.free_slots, self.one()
        if len(free) < 2:
            return
        values = {"own": int(free[1])} | ({"other": one[1]} if one else {})
        yield from _elements(free, (0, len(free) - 1), lambda n: values, "the free rows")

    def _released(self, **of: Any) -> Iterator[Place]:
        """Pages that were freed, and are not in the free list yet."""
        pages, one = getattr(self.inner(self.case.pool), "release_pages", None), self.one()
        if not isinstance(pages, torch.Tensor) or not len(pages):
            return
        values = {} if one is None else self.values(one[1], 0, self.case.pool, self.page)
        words = f"a released page of the {self.case.pool} pool"
        for n in range(len(pages)):
            yield Place(pages, (n,), values, words)

    def _output(self, **of: Any) -> Iterator[Place]:
        """A token of an answer, after it was noted."""
        yield from self._tokens_of("output_ids")

    def _prompt(self, **of: Any) -> Iterator[Place]:
        """A token of a prompt, after the request has come."""
        yield from self._tokens_of("origin_input_ids")

    def _tokens_of(self, name: str) -> Iterator[Place]:
        if (one := self.one()) is not None:
            request = one[0]
            tokens = getattr(request, name)
            words = f"{name} of {request.rid}"
            yield from _elements(tokens, range(len(tokens)), tokens_to, words, str(request.rid))

    def _input_ids(self, batch: Any = None, **of: Any) -> Iterator[Place]:
        """A token that a forward is handed."""
        yield from in_tensor(batch, "input_ids", tokens_to)

    def _extend_lens(self, batch: Any = None, **of: Any) -> Iterator[Place]:
        """The lengths of a prefill, on the device."""
        for name in ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc"):
            yield from in_tensor(batch, name, self._near(getattr(batch, name, None)))

    def _host_lens(self, batch: Any = None, **of: Any) -> Iterator[Place]:
        """The lengths of a batch, on the host."""
        for name in ("seq_lens_cpu", "orig_seq_lens"):
            yield from in_tensor(batch, name, self._near(getattr(batch, name, None)))
        for name in ("extend_lens", "prefix_lens", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"):
            given = getattr(batch, name, None)
            if isinstance(given, list) and given:
                yield from _elements(given, range(len(given)), self._near(given), name)

    def _near(self, given: Any) -> Values:
        """The wrong values of a length: another request's, half of it, a page more."""

        def values(n: int) -> dict[str, int]:
            now = int(given[n])
            found = {"own": now // 2, "freed": now + self.page}
            return found | ({"other": int(given[n - 1])} if len(given) > 1 else {})

        return values


def tokens_to(n: int) -> dict[str, int]:
    """The wrong tokens at place ``n`` of a list of tokens."""
    return {"other": 17 + n % 64, "own": 23, "freed": 42}


def in_tensor(owner: Any, name: str, values: Values) -> Iterator[Place]:
    """The elements of ``owner.name``, a tensor that is replaced and not written into."""
    tensor = getattr(owner, name, None)
    if not isinstance(tensor, torch.Tensor) or not tensor.numel() or tensor.dim() != 1:
        return

    def put(changed: torch.Tensor) -> None:
        setattr(owner, name, changed)

    for n in range(len(tensor)):
        yield Place(tensor, (n,), values(n), f"{name}[{n}]", put)


def attribute(owner: Any, name: str, values: dict[str, int], words: str, rid: str = "") -> Place:
    """One number that is an attribute."""

    def put(changed: torch.Tensor) -> None:
        setattr(owner, name, int(changed[0]))

    now = torch.tensor([int(getattr(owner, name))])
    return Place(now, (0,), values, words, put, rid=rid)


def _key(owner: Any, key: Any, values: dict[str, int], words: str, rid: str) -> Place:
    """One number of a dictionary."""

    def put(changed: torch.Tensor) -> None:
        owner[key] = int(changed[0])

    return Place(torch.tensor([int(owner[key])]), (0,), values, words, put, rid=rid)


def _elements(
    numbers: Any, which: Any, values: Values, words: str, rid: str = ""
) -> Iterator[Place]:
    """Elements of a list of Python numbers. They share a tensor, so that two can be swapped."""
    now = torch.tensor([int(x) for x in numbers])

    def put(changed: torch.Tensor) -> None:
        for n, value in enumerate(changed.tolist()):
            if numbers[n] != value:
                numbers[n] = value

    for n in which:
        yield Place(now, (n,), values(n), f"{words}[{n}]", put, rid=rid)
