"""What all hooks of the ledger share: the pools, isolation, and the name of the caller."""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from g4debug.hooking import targets
from g4debug.hooking.hooks import Isolated
from g4debug.ledger import shadow as shadows
from g4debug.ledger.ledger import Ledger, PoolLedger
from g4debug.ledger.owners import Owners
from g4debug.trapping.trap import TrapError

# Modules whose frames nobody looks for when they ask who called an allocator. A module is known by
# its own name, because the folder that it is installed in may have any name.
_SKIPPED = re.compile(
    r"(g4debug|functools|contextlib|torch\.utils\._contextlib)(\.|$)"
    r"|sglang\.srt\.(mem_cache\.(allocator|allocation|swa_memory_pool|common)|plugins\.hook_registry)"
)
_SGLANG = "sglang.srt."


class Feed:
    """A ledger, and which of its pools each allocator belongs to."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.pools: dict[int, PoolLedger] = {}  # by id() of the inner allocator

    def know(self, allocator: Any, name: str) -> None:
        """Start the books of ``allocator``, which is the one of the pool ``name``."""
        page_size = int(allocator.page_size)
        pool = PoolLedger(name, int(allocator.size) // page_size + 1, page_size)
        self.pools[id(allocator)] = self.ledger.pools[name] = pool
        if name == "full":
            self.ledger.shadow = self.ledger.owners = None
            if _is_sglangs(allocator):
                self.ledger.shadow = shadows.new(pool.pages, allocator.device)
                self.ledger.owners = Owners(
                    pool.pages, page_size, allocator.device, self.ledger.status.limit
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
        """The same for what is called once, later, and is not kept until then."""
        ledger, isolated = self.ledger, self._isolated(entry, False)

        def unless_given_up(*args: Any) -> Any:
            return None if ledger.broken else isolated(*args)

        return unless_given_up

    def _isolated(self, hook: Callable[..., Any], watches: bool) -> Isolated:
        def failed(error: Exception) -> None:
            if isinstance(error, TrapError):
                raise error
            name = getattr(hook, "__name__", "a hook")
            self.ledger.give_up(f"it failed in {name}: {type(error).__name__}: {error}", error)

        return Isolated(hook, failed, watches=watches)


def _is_sglangs(allocator: Any) -> bool:
    """True if all methods of the allocator are hooked. A subclass may have others."""
    paths = (targets.path(site) for site in ("pool.init", "pool.init.token"))
    known = [pkgutil.resolve_name(p.rpartition(".")[0]) for p in paths if p is not None]
    return type(allocator) in known


class TrapsLast:
    """Makes several entries that belong together, and then raises the first finding of them."""

    def __enter__(self) -> Callable[..., None]:
        self.first: TrapError | None = None
        return self._attempt

    def _attempt(self, entry: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            entry(*args, **kwargs)
        except TrapError as e:
            self.first = self.first or e

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None and self.first is not None:
            raise self.first


# Keyed by strings and numbers: the hash of a code object is computed anew each time.
_uninteresting: dict[str, bool] = {}  # by module
_names: dict[tuple[str, int, str], str] = {}  # of the callers that were seen before


def caller() -> str:
    """Who called the allocator, for example ``schedule_batch.py:2744 _evict_swa``.

    Another plugin may have put a function of its own between SGLang and the allocator. Whether it
    only looked on or made the call, no frame tells; so it is named, and SGLang's function after
    it: ``their_plugin.py:12 looked, called by schedule_batch.py:2744 _evict_swa``.
    """
    foreign = ""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        skip = _uninteresting.get(module)
        if skip is None:
            skip = _uninteresting[module] = _SKIPPED.match(module) is not None
        if not skip:
            at = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
            name = _names.get(at)
            if name is None:
                name = _names[at] = f"{Path(at[0]).name}:{at[1]} {at[2]}"
            if module.startswith(_SGLANG):
                return f"{foreign}, called by {name}" if foreign else name
            foreign = foreign or name
        frame = frame.f_back
    return foreign
