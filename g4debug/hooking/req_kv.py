"""Where a request keeps its lengths and its row of ``req_to_token``.

SGLang moved them from the request to ``Req.kv``, one by one, from 0.5.18 on. Not the version is
asked but the request itself. ``Req.kv`` is None or a new, empty record as soon as the request's KV
is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

COMMITTED, ALLOCATED, ROW = "kv_committed_len", "kv_allocated_len", "req_pool_idx"
PROTECTED = "cache_protected_len"
EVICTED = "swa_evicted_seqlen"
MOST_EVICTED = "max_evicted_seqlen"  # from 0.5.21 on, see evicts_by_component
# What is noted of each request in each step.
OF_STEP: tuple[str, ...] = (ROW, COMMITTED, ALLOCATED, EVICTED)
_KV = attrgetter("kv")


def holder(request: Any, name: str) -> Any:
    """The object that has the field ``name`` of a request: its ``kv``, or the request itself."""
    kv = getattr(request, "kv", None)
    return kv if hasattr(kv, name) else request


def values(requests: Sequence[Any], name: str) -> list[Any]:
    """The field ``name`` of each request, None where it has not got it.

    For reads in each step: it takes a third of the time of a call for each request.
    """
    if not requests:
        return []
    path = name if holder(requests[0], name) is requests[0] else f"kv.{name}"
    try:
        return list(map(attrgetter(path), requests))
    except AttributeError:
        return [getattr(holder(r, name), name, None) for r in requests]


def of_step(requests: Sequence[Any]) -> Iterable[Any]:
    """The fields ``OF_STEP`` of each request, request by request, in one pass.

    To take them raises AttributeError if a request has not got a field, and as long as
    :func:`columns` has not seen requests of this SGLang.
    """
    return _of_step(requests)


def _by_component(requests: Sequence[Any]) -> list[Any]:
    """``of_step`` from 0.5.21 on, where all is in ``kv``.

    It reads behind ``max_evicted_seqlen``: that property of each request would take as long as
    all the rest.
    """
    found: list[Any] = []
    for kv in map(_KV, requests):
        evicted = kv.component_evicted_seqlens
        most = max(evicted.values()) if evicted else 0
        found += kv.req_pool_idx, kv.kv_committed_len, kv.kv_allocated_len, most
    return found


def _by_name(*names: str) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """``of_step`` where the fields have these names."""
    fields: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)
    return lambda requests: chain.from_iterable(map(fields, requests))


_of_step = _by_name(*OF_STEP)  # where SGLang has them


def columns(requests: Sequence[Any]) -> list[list[Any]]:
    """The fields ``OF_STEP`` of all requests, field by field, None where one has not got it."""
    global _of_step
    if not requests:
        return [[] for _ in OF_STEP]
    names, own, by_component = OF_STEP, requests[0], evicts_by_component(requests)
    if by_component:
        names = tuple(MOST_EVICTED if name == EVICTED else name for name in names)
    paths = [name if holder(own, name) is own else f"kv.{name}" for name in names]
    in_kv = all(path != name for path, name in zip(paths, names, strict=True))
    _of_step = _by_component if by_component and in_kv else _by_name(*paths)
    return [values(requests, name) for name in names]


def column(requests: Sequence[Any], name: str) -> list[int]:
    """The same as numbers: -1 for a row, and 0 for a length, that a request has not got."""
    found = values(requests, name)
    if None in found:
        nothing = -1 if name == ROW else 0
        return [nothing if x is None else x for x in found]
    return found


def committed(request: Any) -> int:
    """How many tokens of the request have KV that counts."""
    return int(holder(request, "kv_committed_len").kv_committed_len)


def allocated(request: Any) -> int:
    """For how many tokens of the request there is room in the KV pool. 0 after its release."""
    return int(getattr(holder(request, "kv_allocated_len"), "kv_allocated_len", 0))


def row(request: Any) -> int:
    """The request's row of ``req_to_token``, -1 if it has none."""
    found = holder(request, "req_pool_idx").req_pool_idx
    return -1 if found is None else int(found)


def protected(request: Any) -> int | None:
    """How many of the request's first tokens are the prefix cache's. None: SGLang does not say."""
    found = getattr(holder(request, "cache_protected_len"), "cache_protected_len", None)
    return found if isinstance(found, int) else None


def prefix(request: Any) -> int:
    """How many tokens of it need not be computed: its cached prefix, and its chunks up to now."""
    found = getattr(request, "prefix_len", None)  # from 0.5.21 on
    return len(request.prefix_indices) if found is None else int(found)


def evicted_column(requests: Sequence[Any]) -> list[int]:
    """:func:`evicted` of each request. Raises AttributeError as that does."""
    if evicts_by_component(requests):
        return [evicted(request) for request in requests]
    found = values(requests, EVICTED)
    if None in found:
        raise AttributeError("a request without swa_evicted_seqlen")
    return [int(n) for n in found]


def evicts_by_component(requests: Sequence[Any]) -> bool:
    """True if a request notes its evictions for each kind of layer: from 0.5.21 on."""
    return bool(requests) and hasattr(getattr(requests[0], "kv", None), "component_evicted_seqlens")


def evicted(request: Any) -> int:
    """Up to which token the request has given back its SWA pages.

    Raises AttributeError if this SGLang keeps that elsewhere.
    """
    record: Any = getattr(request, "kv", None)
    if hasattr(record, "component_evicted_seqlens"):  # from 0.5.21 on, for each kind of layer
        return int(getattr(record, MOST_EVICTED))
    return int(holder(request, "swa_evicted_seqlen").swa_evicted_seqlen)


def least_evicted(request: Any) -> int:
    """As :func:`evicted`, of the kind of layer that has given back least; 0 if it is not known."""
    record: Any = getattr(request, "kv", None)
    if hasattr(record, "component_evicted_seqlens"):
        return min(record.component_evicted_seqlens.values(), default=0)
    return int(getattr(holder(request, EVICTED), EVICTED, 0) or 0)
