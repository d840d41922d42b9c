"""All requests that a scheduler has, and where each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from g4debug.hooking import req_kv

LONGEST = 80  # characters of an id


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
    chunk = getattr(scheduler, "chunked_req", None)
    found: dict[int, Work] = {}  # a request may be in several batches
    for n, request in enumerate(running(scheduler)):
        if request is None or request is not chunk:
            found[n if request is None else id(request)] = Work(request, Place.RUNS)
    if chunk is not None:
        found[id(chunk)] = Work(chunk, Place.CHUNK)
    begun = [work for work in found.values() if not _has_ended(work.request)]
    place = Place.STORAGE if _stores(scheduler) else Place.QUEUE
    queued = [Work(request, place) for request in getattr(scheduler, "waiting_queue", ())]
    return begun + queued + _others(scheduler)


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


def name(request: Any) -> str:
    """A request's id in a sentence. The client may have chosen it: of any length and characters."""
    rid = str(getattr(request, "rid", ""))
    text = "".join(c if c.isprintable() else "?" for c in rid[:LONGEST])
    return text + ("…" if len(rid) > LONGEST else "")


def holds_memory(request: Any) -> bool:
    """True if a request has a row, and so may have pages."""
    return req_kv.column([request], req_kv.ROW)[0] >= 0


def _has_ended(request: Any) -> bool:
    ended = getattr(request, "finished", None)
    return ended is not None and bool(ended())


def _others(scheduler: Any) -> list[Work]:
    """What is in no queue of the scheduler's own."""
    grammars = getattr(scheduler, "grammar_manager", None)
    found = _in(getattr(grammars, "grammar_queue", ()), Place.GRAMMAR)
    for name in _PEERS:
        queue = getattr(scheduler, name, None)
        if queue is not None:
            found += _in(getattr(queue, "retracted_queue", ()), Place.RETRACTED)
            found += _in(getattr(queue, "queue", queue), Place.PEER)
    return found


def _in(queue: Any, place: Place) -> list[Work]:
    entries: Iterable[Any] = queue if isinstance(queue, Iterable) else ()
    # Disaggregation has its requests in entries of its own.
    return [Work(getattr(entry, "req", entry), place) for entry in entries]


def _stores(scheduler: Any) -> bool:
    return bool(
        getattr(scheduler, "enable_hicache_storage", False)
        or getattr(scheduler, "enable_lmcache", False)
    )
