"""Says which of the faults that were asked for can never fire in this server, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from g4debug import backends
from g4debug.backends.base import TableAdapter
from g4debug.combinations.seen import NO_DRAFT, Combination, running
from g4debug.faults.base import Asked, Fault, Injection
from g4debug.hooking.hooks import Hooks, Isolated, Order
from g4debug.hooking.resolved import server_argument

logger = logging.getLogger("g4debug")


def install(injections: Iterable[Injection], hooks: Hooks) -> None:
    """Log it once, when the scheduler is complete. A failure of ours must not end the server."""
    faults = [injection.fault for injection in injections]

    def after(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        ranks = int(server_argument(getattr(scheduler, "server_args", None), "tp_size", 1))
        for fault, lacks in idle(faults, running(scheduler), ranks):
            logger.warning(
                "g4debug: the fault %s can never fire in this server, which has no %s", fault, lacks
            )

    def failed(error: Exception) -> None:
        logger.error("g4debug: it is not known which faults can fire here", exc_info=error)

    if faults:
        told = Isolated(after, failed, watches=True)
        hooks.after("scheduler.init", Order.FAULT, "clock", told)


def idle(faults: Iterable[Fault], found: Combination, ranks: int) -> Iterator[tuple[str, str]]:
    """(id of a fault, what the server lacks for it) of each that can never fire."""
    has: dict[Asked, bool] = {
        "a draft": found.draft != NO_DRAFT,
        "a SWA pool": not found.pool or "SWA" in found.pool,
        "page tables": not found.backends or any(map(_has_tables, found.backends)),
    }
    for fault in faults:
        lacks = [what.removeprefix("a ") for what in fault.asks if not has[what]]
        if ranks < fault.ranks:
            lacks.append(f"{fault.ranks} tensor-parallel ranks")
        if lacks:
            yield fault.id, " and no ".join(lacks)


def _has_tables(backend: str) -> bool:
    """True if the backend's metadata have page tables. One that reads SGLang's rows has none."""
    try:
        found = backends.adapter(backend)
    except KeyError:
        return False
    return isinstance(found, TableAdapter) and bool(found.tables)
