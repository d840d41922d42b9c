"""Makes the memory map of this process: at start, and again on an idle server when it has changed.

On a busy server PyTorch's caching allocator may get more segments, and the map does not know them.
So a dump that the main thread makes has the segments of its own time. A map that cannot be renewed
says that it has not all segments: that of the black box, on a server that has no time for it, and
that of a dump that another thread makes. That thread must not ask the allocator: the main thread
may have its lock and wait for a device that hangs.

Everything is asked of host objects: a tensor knows its address, and the caching allocator its
segments. Nothing waits for the device. Buffers are found by what is there, not by a list: every
tensor of a KV pool, of an attention backend, and of a model.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from g4debug.findings import memory_map
from g4debug.findings.memory_map import (
    GAP,
    GIVEN_BACK,
    KV,
    SEGMENT,
    WEIGHTS,
    MemoryMap,
    MemoryRange,
)
from g4debug.hooking.kv_buffers import PARTS
from g4debug.trapping.describe import Describer

if TYPE_CHECKING:
    from g4debug.tracers.base import Context
    from g4debug.tracers.flight_recorder.embedding_lookups import Seen

DEPTH = 3  # of attributes, lists and mappings in which an attention backend keeps its buffers
ITEMS = 4096  # of an attention backend that are looked at
OFTEN = 5  # seconds between two looks on an idle server
RARELY = 100  # times as long as it took to make the map, until it is made again
OLD = 32  # segments that the allocator gave back, which are kept
OF_SEGMENTS = (SEGMENT, GIVEN_BACK)
SMALL = 1 << 20  # bytes; smaller weights are only marked in their segment
SMALL_ON_HOST = 4096  # where there are no segments
logger = logging.getLogger("g4debug")
_GROUP = re.compile(r"(?:^|.*?\.)(layers\.\d+|embed\w*)(?:\.|$)")


class MemoryWatch:
    """Keeps the map of this process. It is read when the device may be dead.

    stale: the map may lack segments, because the allocator has got others since it was made.
    """

    def __init__(
        self, context: Context, seen: Seen, made: Callable[[], None] = lambda: None
    ) -> None:
        """made: called when there is another map, so that the black box can keep it."""
        self.context, self.seen, self.made = context, seen, made
        self.map: MemoryMap | None = None
        self.stale = False
        self._state, self._next = -1, 0.0
        self._telling = False  # while the black box gets the map

    def install(self) -> None:
        self.context.after("scheduler.init", self.after_scheduler_init)
        self.context.before("scheduler.on_idle", self.before_idle)
        describer = self.context.trap.describe
        if isinstance(describer, Describer):
            describer.memory = self.last

    def last(self) -> MemoryMap | None:
        """The map. In the main thread it has the segments of now; elsewhere it says if it may lack
        some. A scheduler that dies while it starts has none yet, and gets it now.
        """
        if self.map is None:
            return self._now()
        if threading.current_thread() is threading.main_thread() and not self._telling:
            self._renew()
        return dataclasses.replace(self.map, segments=False) if self.stale else self.map

    def after_scheduler_init(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self._make()
        return result

    def before_idle(self, *args: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        if now >= self._next and self.map is not None:
            self._next = now + OFTEN
            if self.stale or changed(self._device) != self._state:
                self._make()
                # A server of very many segments may be asked something meanwhile.
                self._next += RARELY * (time.monotonic() - now)

    def look(self) -> None:
        """On a busy server, about once in a second: the black box must not have a map that claims
        to know all segments if the allocator has got others.
        """
        if self.map is not None and not self.stale:
            try:
                self.stale = changed(self._device) != self._state
            except Exception as e:
                self._not_known(e)
            if self.stale:
                self._tell()

    @property
    def _device(self) -> int | None:
        """The number of the map's device. Without it, PyTorch would ask the driver for that."""
        number = self.map.device.rpartition(":")[2] if self.map is not None else ""
        return int(number) if number.isdecimal() else None

    def _make(self) -> None:
        old, self._state = self.map, changed(self._device)
        new = self._now()
        self.map = new if old is None else _with_given_back(new, old)
        self.stale = False
        self._tell()

    def _tell(self) -> None:
        self._telling = True
        try:
            self.made()
        finally:
            self._telling = False

    def _renew(self) -> None:
        """Ask for the segments again, if they have changed. The device may be dead by now."""
        if self.map is None:
            return
        try:
            state = changed(self._device)
            if self.stale or state != self._state:
                self.map = with_segments_of_now(self.map, self.context.recorder.step)
                self._state, self.stale = state, False
        except Exception as e:
            self._not_known(e)

    def _not_known(self, error: Exception) -> None:
        self.stale = True
        logger.warning(
            "g4debug: the memory map may lack segments of PyTorch's memory, which could not be "
            "asked for (%s: %s)",
            type(error).__name__,
            error,
        )

    def _now(self) -> MemoryMap:
        recorder = self.context.recorder
        return make(recorder.scheduler, self.seen.runners, recorder.step)


def with_segments_of_now(old: MemoryMap, step: int) -> MemoryMap:
    """The map with the allocator's segments of now; everything else stays as it is."""
    rest = [r for r in old.ranges if r.what not in OF_SEGMENTS]
    known, weights = ([r for r in rest if (r.what == WEIGHTS) == is_] for is_ in (False, True))
    found = memory_map.make((*rest, *_segments(known, weights)), step, old.device, uses_cuda())
    found = dataclasses.replace(found, left_out=old.left_out + found.left_out)
    return _with_given_back(found, old)


def _with_given_back(new: MemoryMap, old: MemoryMap) -> MemoryMap:
    """The new map, and the segments of the old one that the allocator has given back to CUDA.

    One that is a part of a segment now, or of which the new map has only the place, is still there.
    Where the new map has not even all places, nothing is known to be gone.
    """
    if not new.segments:
        return new
    there = sorted((r.start, r.end) for r in new.known if r.what == SEGMENT)

    def is_gone(r: MemoryRange) -> bool:
        at = bisect.bisect_right(there, (r.start, memory_map.LARGEST))
        return at == 0 or there[at - 1][1] <= r.start

    gone = [
        dataclasses.replace(r, what=GIVEN_BACK)
        for r in old.ranges
        if r.what in OF_SEGMENTS and is_gone(r)
    ]
    kept = sorted(gone, key=lambda r: -r.nbytes)[:OLD]
    return dataclasses.replace(
        new, ranges=tuple(sorted((*new.ranges, *kept), key=lambda r: (r.start, -r.nbytes)))
    )


def make(scheduler: Any, runners: Iterable[Any], step: int) -> MemoryMap:
    """The map of a scheduler with these ``ModelRunner`` objects, the target's first."""
    found = list(_indices(scheduler))
    weights: list[MemoryRange] = []
    device = ""
    for runner in runners:
        name = "draft" if getattr(runner, "is_draft_worker", False) else "target"
        device = device or str(getattr(runner, "device", ""))
        found += kv_buffers(getattr(runner, "token_to_kv_pool", None), name)
        weights += _weights(getattr(runner, "model", None), name)
        for backend in _backends(runner):
            found += _backend(backend, name)
    cuda = uses_cuda()
    if cuda:
        device = f"cuda:{torch.cuda.current_device()}"
        found += _segments(found, weights)
    large = [w for w in weights if w.nbytes >= (SMALL if cuda else SMALL_ON_HOST)]
    return memory_map.make((*found, *large), step, device, cuda)


def uses_cuda() -> bool:
    """True if this process has a CUDA context; asking makes none."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def changed(device: int | None = None) -> int:
    """A number that differs when the caching allocator has got or given back a segment.

    device: its number; the current one if it is None. Nothing is asked of the driver if it is
    given.
    """
    if not uses_cuda():
        return 0
    stats = torch.cuda.memory_stats(device)
    names = ("segment.all.allocated", "segment.all.freed")
    return sum(int(stats.get(name, 0)) for name in names)


def kv_buffers(pool: Any, runner: str) -> Iterator[MemoryRange]:
    """The buffers of each layer of a KV pool; of a SWA pool, of both pools in it."""
    mapping = getattr(pool, "layers_mapping", None)
    if not mapping:
        yield from _of_pool(pool, "full", runner, {})
        return
    for inner, name in ((pool.full_kv_pool, "full"), (pool.swa_kv_pool, "swa")):
        ids = {at: layer for layer, (at, is_swa) in mapping.items() if is_swa == (name == "swa")}
        yield from _of_pool(inner, name, runner, ids)


def _of_pool(pool: Any, name: str, runner: str, ids: dict[int, int]) -> Iterator[MemoryRange]:
    """ids: place in the pool -> layer id. Without it, layers count from the pool's first."""
    size, page_size = getattr(pool, "size", 0), getattr(pool, "page_size", 0)
    if not (isinstance(size, int) and isinstance(page_size, int) and page_size > 0):
        return
    first = int(getattr(pool, "start_layer", 0) or 0)
    pages = (size + page_size) // page_size  # with the reserved page 0
    for field, value in vars(pool).items():
        if not (isinstance(value, (list, tuple)) and field.endswith("_buffer")):
            continue
        for at, tensor in enumerate(value):
            if not isinstance(tensor, torch.Tensor) or not tensor.numel() or not tensor.dim():
                continue
            # A buffer that shares its rows with another one has pages that are not its own.
            rows = tensor.shape[0] * tensor.stride(0) * tensor.element_size()
            own = tensor.is_contiguous() and rows % pages == 0
            yield MemoryRange(
                start=tensor.data_ptr(),
                nbytes=rows,
                what=KV,
                name=field,
                pool=name,
                runner=runner,
                layer=ids.get(at, first + at),
                part=PARTS.get(field, field.removesuffix("_buffer").replace("_", " ")),
                dtype=str(tensor.dtype).removeprefix("torch."),
                page_bytes=rows // pages if own else 0,
                page_size=page_size,
            )


def _indices(scheduler: Any) -> Iterator[MemoryRange]:
    """``req_to_token`` and the mapping from the full pool's slots to those of the SWA pool."""
    rows = getattr(getattr(scheduler, "req_to_token_pool", None), "req_to_token", None)
    allocator = getattr(scheduler, "token_to_kv_pool_allocator", None)
    mapping = getattr(allocator, "full_to_swa_index_mapping", None)
    for what, tensor in (("req_to_token", rows), ("mapping", mapping)):
        if isinstance(tensor, torch.Tensor):
            yield _whole(tensor, what, "")


def _backends(runner: Any) -> Iterator[Any]:
    """A runner's attention backends. A draft has another one for its own steps, and that one may
    have one for each step.
    """
    yield getattr(runner, "attn_backend", None)
    draft = getattr(runner, "draft_attn_backend", None)
    yield draft
    steps = getattr(draft, "attn_backends", None)
    yield from steps if isinstance(steps, (list, tuple)) else ()


def _backend(backend: Any, runner: str) -> Iterator[MemoryRange]:
    """Every tensor that hangs on an attention backend: page tables, lists, lengths, workspaces.

    Views of the same memory are one range, named after the one that was found first.
    """
    if backend is None:
        return
    room = itertools.count()
    waiting: list[tuple[str, Any, int]] = [("", backend, 0)]
    seen: set[int] = set()
    for path, value, depth in waiting:
        if next(room) >= ITEMS or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            name = f"{type(backend).__name__}{path}"
            what = "page table" if path.rstrip("]").endswith("page_table") else "token list"
            indexes = path.rstrip("]").endswith(("page_table", "indices"))
            yield _whole(value, what if indexes else "attention buffer", name, runner)
        elif depth < DEPTH:
            waiting += [(f"{path}{at}", item, depth + 1) for at, item in _items(value, depth)]


def _items(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """What is in a mapping or list, and the fields of an attention backend or of its metadata."""
    if isinstance(value, dict):
        yield from ((f"[{at}]", item) for at, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{at}]", item) for at, item in enumerate(value))
    elif depth == 0 or type(value).__name__.endswith(("Metadata", "Backend")):
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _whole(tensor: torch.Tensor, what: str, name: str, runner: str = "") -> MemoryRange:
    """The whole memory behind a tensor."""
    storage = tensor.untyped_storage()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return MemoryRange(storage.data_ptr(), storage.nbytes(), what, name, runner=runner, dtype=dtype)


def _weights(model: Any, runner: str) -> list[MemoryRange]:
    """The model's weights, those of a layer that lie behind each other as one."""
    if not isinstance(model, torch.nn.Module):
        return []
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    ranges = [_whole(t, WEIGHTS, _group(name), runner) for name, t in tensors]
    return _joined(ranges, GAP)


def _joined(ranges: Iterable[MemoryRange], gap: int) -> list[MemoryRange]:
    """Ranges of one name that lie behind each other, with at most so many bytes between, as one."""
    joined: list[MemoryRange] = []
    for r in sorted(ranges, key=lambda r: r.start):
        last = joined[-1] if joined else None
        if last is not None and last.name == r.name and r.start - last.end <= gap:
            nbytes = max(last.end, r.end) - last.start
            r = dataclasses.replace(r, start=last.start, nbytes=nbytes)
            joined.pop()
        joined.append(r)
    return joined


def _group(name: str) -> str:
    """``layers.3`` of ``model.layers.3.mlp.weight``; else the name without its last part."""
    found = _GROUP.match(name)
    return found[1] if found else name.rpartition(".")[0] or name


def _segments(known: list[MemoryRange], weights: list[MemoryRange]) -> list[MemoryRange]:
    """The segments of PyTorch's caching allocator, each with what is known to be in it."""
    inside = sorted((*known, *weights), key=lambda r: r.start)
    starts = [r.start for r in inside]
    found = []
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        start, nbytes = int(segment["address"]), int(segment["total_size"])
        first, last = (bisect.bisect_left(starts, at) for at in (start, start + nbytes))
        held = set(map(_short, inside[first:last]))
        private = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        if private:
            held.add("a CUDA graph's private pool")
        if not segment["allocated_size"]:
            held.add("free")
        elif not held:
            held.add("workspace and activations")
        found.append(MemoryRange(start, nbytes, SEGMENT, " and ".join(sorted(held))))
    return _joined(found, 0)


def _short(r: MemoryRange) -> str:
    return WEIGHTS if r.what == WEIGHTS else "KV" if r.what == KV else "buffers"
