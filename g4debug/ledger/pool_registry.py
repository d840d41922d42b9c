"""Which allocator is which pool of the ledger, and the isolation of the ledger's hooks."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

from g4debug.hooking import targets
from g4debug.hooking.hooks import Isolated
from g4debug.ledger import shadow as shadows
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.doubts import Doubts
from g4debug.ledger.free_lists import FreeLists
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.owners import Owners
from g4debug.trapping.trap import TrapError


class PoolRegistry:
    """A ledger, and which of its pools each allocator belongs to."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.pools: dict[int, PoolLedger] = {}  # by id() of the inner allocator
        self.lists: dict[int, FreeLists] = {}  # by the same

    def know(self, allocator: Any, name: str) -> None:
        """Start the books of ``allocator``, which is the one of the pool ``name``."""
        page_size = int(allocator.page_size)
        pool = PoolLedger(name, int(allocator.size) // page_size + 1, page_size)
        self.pools[id(allocator)] = self.ledger.pools[name] = pool
        self.lists[id(allocator)] = self.ledger.lists[name] = FreeLists(allocator)
        if name == "full":
            self.ledger.shadow = self.ledger.owners = None
            if _is_sglangs(allocator):
                self.ledger.shadow = shadows.new(pool.pages, allocator.device)
                self.ledger.owners = Owners(
                    pool.pages,
                    page_size,
                    allocator.device,
                    self.ledger.status.limit,
                    Doubts(self.ledger.recorder),
                )
            else:
                self.ledger.status.limit(
                    "it cannot tell which pages of a page table are free",
                    f"{type(allocator).__qualname__} is not an allocator that it knows",
                )

    def isolate(self, hook: Callable[..., Any], watches: bool = False) -> Isolated:
        """``hook``, which gives up the ledger if it fails, and does nothing from then on.

        watches: as of :class:`Isolated`, for a hook that runs after a site.
        """
        isolated = self._isolated(hook, watches)
        self.ledger.stop_when_given_up(isolated)
        return isolated

    def once(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a function that is called once, later. The ledger does not remember it."""
        ledger, failed = self.ledger, self._failed

        # Not by way of Isolated: one is made for each event, and called once.
        def unless_given_up(*args: Any) -> Any:
            if ledger.broken:
                return None
            try:
                return entry(*args)
            except TrapError:
                raise
            except Exception as e:
                failed(entry, e)
                return None

        return unless_given_up

    def _isolated(self, hook: Callable[..., Any], watches: bool) -> Isolated:
        failed = partial(self._failed, hook)
        return Isolated(hook, failed, watches=watches, lets=(TrapError,))

    def _failed(self, hook: Callable[..., Any], error: Exception) -> None:
        name = getattr(hook, "__name__", "a hook")
        self.ledger.give_up(f"it failed in {name}: {type(error).__name__}: {error}", error)


def _is_sglangs(allocator: Any) -> bool:
    """True if all methods of the allocator are hooked. A subclass may have others."""
    paths = (targets.path(site) for site in ("pool.init", "pool.init.token"))
    known = [pkgutil.resolve_name(p.rpartition(".")[0]) for p in paths if p is not None]
    return type(allocator) in known
