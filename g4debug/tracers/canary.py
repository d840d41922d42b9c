"""Shared by the canaries of the tracers: what must be found and what must not, and an allocator.

A canary's findings are real, and so are their dumps. The allocator is a stand-in with SGLang's free
list, of PAGES pages of PAGE_SIZE tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.dumps import reading
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Chain, parse
from g4debug.findings.record import TrapRecord
from g4debug.ledger.hooks import LedgerHooks
from g4debug.tracers.base import CanaryError
from g4debug.trapping.trap import TrapError

PAGES, PAGE_SIZE = 9, 64


@contextmanager
def sound(what: str) -> Iterator[None]:
    """Nothing may be found in here. what: the sound thing, in words."""
    try:
        yield
    except TrapError as e:
        raise CanaryError(f"{what} was reported as broken: {e.finding.headline}") from e


def found(act: Callable[[], object], what: str) -> TrapRecord:
    """The dump of the finding that stops ``act``. what: the fault, in words."""
    try:
        act()
    except TrapError as e:
        if e.path is None:
            raise CanaryError(f"{what} was found, but not dumped: {e.problem}") from e
        return reading.read(e.path)
    raise CanaryError(f"{what} was not found")


def once(fault: Fault) -> Injection:
    """The fault, to be fired once."""
    return Injection(fault, Chain(parse(f"{fault.id}=1*on").chains[fault.id], 0, fault.id), 0)


def must_have_fired(injection: Injection) -> None:
    if not injection.schedule:
        raise CanaryError(f"the fault {injection.fault.id} did not fire")


def allocator(device: torch.device, **more: Any) -> Any:
    return SimpleNamespace(
        page_size=PAGE_SIZE,
        size=(PAGES - 1) * PAGE_SIZE,
        device=device,
        free_pages=torch.arange(1, PAGES, device=device),
        is_not_in_free_group=True,
        **more,
    )


def take(pool: Any, pages: int) -> torch.Tensor:
    """Take pages from the free list, as PagedTokenToKVPoolAllocator does. Returns their tokens."""
    taken, pool.free_pages = pool.free_pages[:pages], pool.free_pages[pages:]
    tokens: torch.Tensor = taken[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=taken.device)
    return tokens.reshape(-1)


def free(hooks: LedgerHooks, pool: Any, tokens: torch.Tensor) -> None:
    """Free as PagedTokenToKVPoolAllocator does, with the ledger's hook around it."""

    def release(pool: Any, pages: torch.Tensor) -> None:
        pool.free_pages = torch.cat((pages, pool.free_pages))

    hooks.frees.around_release(release, pool, torch.unique(tokens // PAGE_SIZE))
