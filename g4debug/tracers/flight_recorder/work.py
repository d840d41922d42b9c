"""All requests that a scheduler has, and where each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple


class Place(Enum):
    """The values are what a report says of a request there."""

    RUNS = "runs"
    CHUNK = "is a prompt between two of its chunks"
    QUEUE = "waits in the queue"
    RETRACTED = "was retracted, and waits for memory"
    GRAMMAR = "waits for its grammar to be compiled"
    PEER = "waits for the other server of disaggregation"
    STORAGE = "waits in the queue, maybe for its prefix from storage"

    @property
    def outside(self) -> bool:
        """True if it may wait for something that is not the scheduler's, and has limits of its own.

        SGLang gives up on a grammar, a handshake and a transfer after a time.
        """
        return self in (Place.GRAMMAR, Place.PEER, Place.STORAGE)


class Work(NamedTuple):
    request: Any
    place: Place


# SGLang's queues for disaggregation; "queue" is the list in those that are objects.
_PEERS = (
    "disagg_prefill_bootstrap_queue", "disagg_prefill_inflight_queue",
    "disagg_decode_prealloc_queue", "disagg_decode_transfer_queue",
)  # fmt: skip


def of(scheduler: Any) -> list[Work]:
    """The work of a scheduler: what runs first, then the chunk, then the queues in their order.

    A paused engine has none: nothing is due there. A request that has ended is none.
    """
    if scheduler is None or getattr(scheduler, "_engine_paused", False):
        return []
    seen: set[int] = set()
    found = []
    for work in _all(scheduler):
        request = work.request
        ended = getattr(request, "finished", None)
        if id(request) not in seen and not (ended is not None and ended()):
            if request is not None:
                seen.add(id(request))
            found.append(work)
    return found


def outside(scheduler: Any) -> Iterator[str]:
    """What the requests of this server may wait for outside of it, in words."""
    if getattr(getattr(scheduler, "disaggregation_mode", None), "value", "null") != "null":
        yield "the other server (disaggregation)"
    if _stores(scheduler):
        yield "its prefix from storage"


def running(scheduler: Any) -> list[Any]:
    """The requests of the batches that decode: one, or one for each pipeline stage."""
    batches = (getattr(scheduler, "running_batch", None), *(getattr(scheduler, "running_mbs", ())))
    return [r for batch in batches for r in getattr(batch, "reqs", None) or ()]


def _all(scheduler: Any) -> Iterator[Work]:
    chunk = getattr(scheduler, "chunked_req", None)
    yield from (Work(r, Place.RUNS) for r in running(scheduler) if r is None or r is not chunk)
    if chunk is not None:
        yield Work(chunk, Place.CHUNK)
    place = Place.STORAGE if _stores(scheduler) else Place.QUEUE
    yield from _in(getattr(scheduler, "waiting_queue", ()), place)
    grammars = getattr(scheduler, "grammar_manager", None)
    yield from _in(getattr(grammars, "grammar_queue", ()), Place.GRAMMAR)
    for name in _PEERS:
        queue = getattr(scheduler, name, None)
        if queue is not None:
            yield from _in(getattr(queue, "retracted_queue", ()), Place.RETRACTED)
            yield from _in(getattr(queue, "queue", queue), Place.PEER)


def _in(queue: Any, place: Place) -> Iterator[Work]:
    entries: Iterable[Any] = queue if isinstance(queue, Iterable) else ()
    # Disaggregation has its requests in entries of its own.
    yield from (Work(getattr(entry, "req", entry), place) for entry in list(entries))


def _stores(scheduler: Any) -> bool:
    return bool(
        getattr(scheduler, "enable_hicache_storage", False)
        or getattr(scheduler, "enable_lmcache", False)
    )
