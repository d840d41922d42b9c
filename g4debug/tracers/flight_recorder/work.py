"""All requests that a scheduler has, and where each of them is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from g4debug.findings import names
from g4debug.hooking import req_kv
from g4debug.hooking.resolved import dp_attention, server_argument
from g4debug.tracers.flight_recorder import storage_waits


class Place(Enum):
    """The values are what a report says of a request there."""

    RUNS = "runs"
    CHUNK = "is a prompt between two of its chunks"
    QUEUE = "waits in the queue"
    RETRACTED = "was retracted, and waits for memory"
    GRAMMAR = "waits for its grammar to be compiled"
    PEER = "waits for the other server of disaggregation"
    ROOM = "waits for memory of this server, which is to receive it"
    STORAGE = "waits for its prefix from storage"
    STAGING = "waits for its KV to be copied to the host (HiSparse)"
    HELD = "was retracted by pause_generation, and waits for continue_generation"

    @property
    def outside(self) -> bool:
        """True if it waits for something that is not the scheduler's, and mostly has limits of its
        own.

        SGLang gives up on a grammar, a handshake and a transfer after a time, but not on a request
        that waits for ``ROOM``. See :mod:`g4debug.tracers.flight_recorder.outside_waits`.
        """
        return self in OUTSIDE


OUTSIDE = frozenset((Place.GRAMMAR, Place.PEER, Place.STORAGE, Place.STAGING, Place.HELD))


class Work(NamedTuple):
    request: Any
    place: Place


class Queue(NamedTuple):
    """Where SGLang has requests: the path from its scheduler, and its name for a reader.

    passing: these requests are in another one, too, before long. shaken: the other server is ready
    for some of these requests, which SGLang notes in them, and they wait for memory.
    """

    path: str
    place: Place
    name: str
    passing: bool = False
    shaken: bool = False


QUEUES = (
    Queue("chunked_req", Place.CHUNK, "chunk in progress"),  # also in a batch while it runs
    Queue("running_batch.reqs", Place.RUNS, "batch"),
    Queue("running_mbs.reqs", Place.RUNS, "batch"),  # one for each stage of a pipeline
    Queue("cur_batch.reqs", Place.RUNS, "batch", passing=True),
    Queue("last_batch.reqs", Place.RUNS, "batch", passing=True),
    Queue("waiting_queue", Place.QUEUE, "waiting queue"),
    Queue("grammar_manager.grammar_queue", Place.GRAMMAR, "grammar queue"),
    Queue("disagg_prefill_bootstrap_queue.queue", Place.PEER, "queue for the other server"),
    Queue("disagg_prefill_inflight_queue", Place.PEER, "queue of transfers"),
    Queue(
        "disagg_decode_prealloc_queue.retracted_queue",
        Place.RETRACTED,
        "queue of retracted requests",
    ),
    Queue(
        "disagg_decode_prealloc_queue.queue", Place.PEER, "queue for the other server", shaken=True
    ),
    Queue("disagg_decode_prealloc_queue.pending_reqs", Place.PEER, "queue for the other server"),
    Queue("disagg_decode_transfer_queue.queue", Place.PEER, "queue of transfers"),
    Queue(
        "disagg_decode_prealloc_queue.held_rebootstrap_reqs",
        Place.HELD,
        "queue of what a pause retracted",
    ),
    Queue("hisparse_coordinator.ack_staging_queue", Place.STAGING, "queue of copies to the host"),
)


# The batches that are on their way: of each stage of a pipeline, too. Such a stage keeps its last
# batch, so one of its requests may have been aborted since then.
PASSING = (*(q.path for q in QUEUES if q.passing), "mbs.reqs", "last_mbs.reqs")


def held(scheduler: Any) -> Iterator[tuple[Any, Queue]]:
    """All requests of a scheduler, and where they are. One may be there several times."""
    for queue in QUEUES:
        for entry in _at(scheduler, queue.path):
            there = queue
            if queue.shaken and getattr(entry, "waiting_for_input", False):
                there = queue._replace(place=Place.ROOM, name="queue for memory")
            # Disaggregation has its requests in entries of its own.
            yield getattr(entry, "req", entry), there


def between(scheduler: Any, items: Iterable[Work]) -> list[Any]:
    """The requests that only a batch has which is on its way; for a round they are in no queue.

    So it is after a prefill, until SGLang adds its requests to the running batch. items: all work.
    """
    known = {id(item.request) for item in items}
    found = {id(r): r for path in PASSING for r in _at(scheduler, path)}
    return [r for at, r in found.items() if at not in known and not _has_ended(r)]


def _at(scheduler: Any, path: str) -> Iterable[Any]:
    found: Iterable[Any] = [scheduler]
    for name in path.split("."):
        found = [one for there in found for one in _each(getattr(there, name, None))]
    return found


def _each(there: Any) -> Iterable[Any]:
    if there is None:
        return ()
    return there if isinstance(there, (list, tuple, deque)) else (there,)


def of(scheduler: Any) -> list[Work]:
    """The work of a scheduler: the chunk first, then what runs, then the queues in their order.

    A paused engine has none: nothing is due there. A request that has ended is none.
    """
    return [] if scheduler is None or paused(scheduler) else everyone(scheduler)


def paused(scheduler: Any) -> bool:
    """True between ``pause_generation`` and ``continue_generation``."""
    return bool(getattr(scheduler, "_engine_paused", False))


def everyone(scheduler: Any) -> list[Work]:
    """The same, and also of an engine that is paused."""
    stored = storage_waits.waits(scheduler)
    found: dict[int, Work] = {}  # a request may be in several batches
    for request, queue in held(scheduler):
        place = queue.place
        if place is Place.QUEUE and stored(request):
            place = Place.STORAGE
        ended = place in (Place.RUNS, Place.CHUNK) and _has_ended(request)
        if not queue.passing and not ended:
            found.setdefault(id(request), Work(request, place))
    return list(found.values())


def outside(scheduler: Any) -> Iterator[str]:
    """What the requests of this server may wait for outside of it, in words."""
    if getattr(getattr(scheduler, "disaggregation_mode", None), "value", "null") != "null":
        yield "the other server (disaggregation)"
    if storage_waits.on(scheduler):
        yield "its prefix from storage"


def limits(scheduler: Any) -> Iterator[tuple[str, str]]:
    """What is not told of this server, and why."""
    for what in outside(scheduler):
        yield "hangs: not of every request", f"one may wait for {what}"
    for what in _not_looked_at(scheduler):
        yield "hangs: not of every request", f"the queue of {what} is not looked at"
    if dp_attention(getattr(scheduler, "server_args", None)):
        yield "hangs: DP attention", "it was never run so"
    if getattr(scheduler, "enable_hisparse", False):
        yield "hangs: HiSparse", "it was never run so"
    if frees_without_steps(scheduler):
        yield (
            "hangs: none is called a deadlock",
            "memory may come back from the host or from storage without a step, and this was never "
            "run so",
        )


def _not_looked_at(scheduler: Any) -> Iterator[str]:
    """Whose queue is none of ``QUEUES``, in words."""
    if getattr(scheduler, "dllm_config", None) is not None:
        yield "a diffusion model"
    if getattr(scheduler, "mm_receiver", None) is not None:
        yield "requests whose images another server encodes"
    if server_argument(getattr(scheduler, "server_args", None), "enable_pdmux"):
        yield "prompts that are split by layers (pdmux)"


def frees_without_steps(scheduler: Any) -> bool:
    """True if memory may become free without a step, by a copy to the host or to storage."""
    named = (
        "enable_hierarchical_cache", "enable_unified_cache_external_linker", "enable_hisparse",
        "enable_decode_hicache", "decode_offload_manager",
    )  # fmt: skip
    args = getattr(scheduler, "server_args", None)
    asked = (server_argument(args, name) for name in ("enable_lmcache", "enable_flexkv"))
    return any(getattr(scheduler, name, None) for name in named) or any(asked)


def name(request: Any) -> str:
    """A request's id in a sentence."""
    return names.name(getattr(request, "rid", ""))


def holds_memory(request: Any) -> bool:
    """True if a request has a row, and so may have pages."""
    return req_kv.column([request], req_kv.ROW)[0] >= 0


def _has_ended(request: Any) -> bool:
    ended = getattr(request, "finished", None)
    return ended is not None and bool(ended())
