"""A second SGLang plugin: hooks of the page ledger that miss one call in ``LOSSY_EVERY``.

The server is healthy, only our books become wrong. Whenever SGLang clears its allocators, as
``flush_cache`` does, a ledger that was given up starts anew. So one engine serves many rounds.
Installed by ``installed(folder)``, with an entry point of its own, like anybody's plugin.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import installed_plugin

GAVE_UP, MISSED = "LOSSY gave up", "LOSSY missed"
# Without these there would be no ledger to get wrong.
KEPT = {"after_init", "after_swa_init", "after_scheduler", "after_clear"}


def installed(folder: Path) -> str:
    """Make the plugin installable from ``folder``; the PYTHONPATH that a server needs for it."""
    installed_plugin.install(folder, "lossy_ledger", "lossy_ledger:register")
    return installed_plugin.path(folder, Path(__file__).parent)


def one_in(every: int, seed: int) -> Iterator[bool]:
    """True for one of each ``every`` calls, at random which: a run never misses none of them."""
    rng = random.Random(seed)
    while True:
        missed = rng.randrange(every)
        yield from (call == missed for call in range(every))


def register() -> None:
    """The entry point. It makes g4debug's hooks forgetful, so it must run before g4debug's own."""
    from g4debug import plugin
    from g4debug.ledger.pool_registry import PoolRegistry

    assert plugin.in_force is None, "g4debug was loaded first: its hooks cannot be changed any more"
    misses = one_in(int(os.environ["LOSSY_EVERY"]), int(os.environ.get("LOSSY_SEED", "0")))
    isolate, once = PoolRegistry.isolate, PoolRegistry.once
    missed = 0

    def missing(hook: Any) -> Any:
        name = getattr(hook, "__name__", "")

        def forgetful(*args: Any, **kwargs: Any) -> Any:
            nonlocal missed
            if name not in KEPT and next(misses):
                missed += 1
                return None
            return hook(*args, **kwargs)

        return forgetful

    def lossy(registry: Any, hook: Any, watches: bool = False) -> Any:
        isolated = isolate(registry, missing(hook), watches)
        if getattr(hook, "__name__", "") != "after_clear":
            return isolated

        def begins_anew(*args: Any, **kwargs: Any) -> Any:
            nonlocal missed
            ledger = registry.ledger
            print(MISSED, missed, flush=True)
            missed = 0
            if ledger.broken:
                print(f"{GAVE_UP}: {ledger.broken}", flush=True)
                ledger.broken = ""
                for stopped in ledger._hooks:
                    stopped.on = True
                for pool in ledger.pools.values():
                    pool.forget()
                if ledger.shadow is not None:
                    ledger.shadow[-1] = 1
            return isolated(*args, **kwargs)

        return begins_anew

    PoolRegistry.isolate = lossy  # type: ignore[method-assign]
    PoolRegistry.once = lambda registry, entry: once(registry, missing(entry))  # type: ignore[method-assign]
