"""Says which of the faults that were asked for can never fire in this server, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from g4debug import backends, speculation
from g4debug.backends.base import Adapter, ListAdapter, TableAdapter
from g4debug.combinations.seen import NO_DRAFT, Combination, running
from g4debug.faults.base import Asked, Fault, Injection
from g4debug.hooking.hooks import Hooks, Isolated, Order
from g4debug.hooking.prefix_sharing import keeps_prefixes
from g4debug.hooking.resolved import server_argument

logger = logging.getLogger("g4debug")


def install(injections: Iterable[Injection], hooks: Hooks) -> None:
    """Log it once, when the scheduler is complete. A failure of ours must not end the server."""
    faults = [injection.fault for injection in injections]

    def after(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        ranks = int(server_argument(getattr(scheduler, "server_args", None), "tp_size", 1))
        for fault, lacks in idle(faults, what_it_has(scheduler), ranks):
            logger.warning(
                "g4debug: the fault %s can never fire in this server, which has no %s", fault, lacks
            )

    def failed(error: Exception) -> None:
        logger.error("g4debug: it is not known which faults can fire here", exc_info=error)

    if faults:
        told = Isolated(after, failed, watches=True)
        hooks.after("scheduler.init", Order.FAULT, "clock", told)


def what_it_has(scheduler: Any) -> dict[Asked, bool]:
    """What the faults ask for -> whether this server has it, or may have it."""
    has = what_runs(running(scheduler))
    tree = getattr(scheduler, "tree_cache", None)
    if tree is not None:
        has["a prefix cache"] = keeps_prefixes(tree)
    return has


def what_runs(found: Combination) -> dict[Asked, bool]:
    """The same, as far as it follows from what the server runs."""
    drafts = found.draft != NO_DRAFT
    worker = next((w for w in speculation.adapters() if w.name == found.draft), None)
    return {
        "a draft": drafts,
        "a draft model": drafts and (worker is None or worker.draft_writes_kv is not None),
        "a draft that reads the target's KV": drafts
        and (worker is None or worker.draft_writes_kv is False),
        "hidden states that a draft begins with": drafts and (worker is None or worker.hidden),
        "a SWA pool": not found.pool or "SWA" in found.pool,
        "page tables": not found.backends or any(map(_has_tables, found.backends)),
        "lists of tokens": not found.backends or any(map(_has_lists, found.backends)),
        "a prefix cache": True,
    }


def idle(
    faults: Iterable[Fault], has: Mapping[Asked, bool], ranks: int
) -> Iterator[tuple[str, str]]:
    """(id of a fault, what the server lacks for it) of each that can never fire."""
    for fault in faults:
        lacks = [what.removeprefix("a ") for what in fault.asks if not has[what]]
        if ranks < fault.ranks:
            lacks.append(f"{fault.ranks} tensor-parallel ranks")
        if lacks:
            yield fault.id, " and no ".join(lacks)


def _has_tables(backend: str) -> bool:
    """True if the backend's metadata have page tables. One that reads SGLang's rows has none."""
    found = _adapter(backend)
    return isinstance(found, TableAdapter) and bool(found.tables)


def _has_lists(backend: str) -> bool:
    """True if the faults in lists find some: not those of a prefill of MLA's page tables."""
    return isinstance(_adapter(backend), ListAdapter)


def _adapter(backend: str) -> Adapter | None:
    try:
        return backends.adapter(backend)
    except KeyError:
        return None
