"""Gives a prompt that waits for its next chunk the SWA pages back that lie behind its own window.

A chunk of a prompt is admitted if the SWA pool has room for it (``PrefillAdder.add_chunked_req``);
else SGLang parks the prompt until the next round. What the prompt itself holds behind its window is
given back in ``maybe_evict_swa``: only once a chunk *is* admitted, and under overlap scheduling not
before the third. If chunks that came before have filled the pool, nobody else can free anything:
the prompt stands for ever, ``/health`` answers 200, and nothing is logged (upstream #36458). With a
prefix cache of before 0.5.21 the same happens where a leaf of the tree is longer than the window,
because a lock on a leaf holds all of its SWA pages. From 0.5.21 on SGLang hands the prefix cache
only a part of a prompt whose beginning other prompts had left there, and which has lost its SWA
pages: up to where they part. What the prompt has behind that is its own, and its lock stays on
the part, far behind the window. SGLang hands over the rest with the next chunk, which never comes.

A prompt that is parked until others end is healthy, so that is left to SGLang, with its own
retractions. The fix acts on a server that is not healthy, in three cases:

* Nothing runs in three rounds in a row, and nothing is launched. By the second no forward is in
  flight, by the third no result has set anything free since SGLang refused: it would for ever.
* Others go on, and the prompt has been parked for ``PATIENCE`` rounds in a row.
* SGLang is about to end the last decoding request with HTTP 500, because it finds no page.

Why no forward needs these pages: under overlap scheduling, a round launches its batch and then
waits for the result of the batch before it. The round that parks the prompt launches none of its
chunks, and waits for the last one that was launched. In the next round all KV of the prompt is
written, and the next to read it is the chunk that begins at ``begin``, with a window that reaches
back from there. Without overlap scheduling each round waits for its own batch. Where a decode is
about to be ended, the last chunk may still be in flight; there the fix waits for the device. A
draft reads from the prompt's end on, which is later. What other requests read is theirs: without a
prefix cache nobody shares pages, and with one each has its own lock. With pipeline parallelism a
chunk may still be in flight, and with disaggregation these pages may still have to be sent. It was
never run with either, so it does nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from g4debug.fixes import _window_lock
from g4debug.fixes._last_decode import spares
from g4debug.fixes._twice_refused import nothing_runs
from g4debug.fixes.base import Fix, around, before
from g4debug.fixes.paths.base import arguments
from g4debug.fixes.source import source
from g4debug.hooking import req_kv
from g4debug.hooking.prefix_sharing import keeps_prefixes

BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
# Rounds in a row for which a prompt is left to SGLang while others go on. A decode takes some 10 ms
# on a GPU, so these are seconds. The flight recorder calls a request starved after ten times as
# many (G4DEBUG_STARVED_STEPS).
PATIENCE = 500


@dataclass
class Wait:
    """How a prompt has waited since its last chunk was launched."""

    rounds: int = 0  # in which it was parked
    alone: int = 0  # so many of the last of them in a row nothing ran, and nothing was launched
    gave: bool = False  # it has given back what lies behind its window


_waits: WeakKeyDictionary[Any, Wait] = WeakKeyDictionary()  # of the requests that are parked
_starved: WeakSet[Any] = WeakSet()  # were parked for PATIENCE rounds: they wait no more


def around_add_chunked(
    call_next: Callable[..., Any], adder: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``PrefillAdder.add_chunked_req``, which returns the request if its prompt goes on."""
    alone = nothing_runs(adder)
    wait = _waits.get(request)
    if wait is not None:
        if wait.rounds >= PATIENCE:
            _starved.add(request)
        if request in _starved or (alone and wait.alone >= 2 and _memory_is_still()):
            _give_back_once(wait, adder.tree_cache, adder.token_to_kv_pool_allocator, request)
    goes_on = call_next(adder, request, *args, **kwargs)
    if goes_on is request and not any(r is request for r in adder.can_run_list):
        wait = _waits.setdefault(request, Wait())
        wait.rounds += 1
        wait.alone = wait.alone + 1 if alone else 0
    return goes_on


def before_prepare(batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``ScheduleBatch.prepare_for_extend``: the batch is launched in this round."""
    if _waits:
        for request in batch.reqs:
            _waits.pop(request, None)
        for wait in _waits.values():
            wait.alone = 0


def make_room(batch: Any, request: Any) -> bool:
    """Let all that are parked give back, before the last request that decodes is ended."""
    # One that was aborted has no row any more, and nothing to give.
    waits = [(r, w) for r, w in _waits.items() if req_kv.column([r], req_kv.ROW)[0] >= 0]
    if all(wait.gave for _, wait in waits):
        return False
    import torch

    torch.get_device_module(batch.device).synchronize()
    for parked, wait in waits:
        _give_back_once(wait, batch.tree_cache, batch.token_to_kv_pool_allocator, parked)
    return True


around_check = spares(make_room)


def _memory_is_still() -> bool:
    """False if pages may come free while nothing runs: a hierarchical cache copies in between."""
    return not arguments().enable_hierarchical_cache


def _give_back_once(wait: Wait, tree: Any, allocator: Any, request: Any) -> None:
    if not wait.gave:
        wait.gave = True
        give_back(tree, allocator, request)


def give_back(tree: Any, allocator: Any, request: Any) -> None:
    """Let others, and the request itself, have its SWA pages behind the window of its next token.

    tree: the prefix cache, or what SGLang has in its place without one.
    """
    if not tree.supports_swa() or not _is_alone():
        return
    if _window_lock.has_it(tree):
        _window_lock.relock(tree, request)
        return
    if keeps_prefixes(tree) and not _hand_over(tree, request):
        return
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    batch = SimpleNamespace(
        tree_cache=tree,
        req_to_token_pool=tree.req_to_token_pool,
        token_to_kv_pool_allocator=allocator,
    )
    ScheduleBatch._evict_swa(batch, request, req_kv.prefix(request))


def _is_alone() -> bool:
    """True if no other server and no other pipeline rank needs the pages of a prompt."""
    args = arguments()
    return bool(args.disaggregation_mode == "null" and args.pp_size == 1)


def lock_shrinks(tree: Any) -> bool:
    """True for the prefix caches in which a lock is made to hold no more than the window."""
    return _window_lock.has_it(tree) or _window_lock.takes_parts(tree)


def _hand_over(tree: Any, request: Any) -> bool:
    """Give the prefix cache what it has not got of the prompt yet, as SGLang does with each chunk.

    The lock of the request then goes to the last window of that, and to no more of it. False if
    that must not be. Then nothing is given back at all: 0.5.12's UnifiedRadixCache would take pages
    that were given back for pages of the prompt, with its next chunk.
    """
    if not _window_lock.takes_parts(tree) or request.skip_radix_cache_insert:
        return False
    if tree.supports_mamba():  # each hand-over takes a slot for a state; SGLang dies without one
        return False
    if not _window_lock.hand_over(tree, request):
        return False
    _window_lock.relock_unified(tree, request)
    return True


def still_broken() -> bool:
    """True if a chunk is parked where the SWA pool is full, and pages are given back only later."""
    evicts = source(f"{BATCH}.maybe_evict_swa")
    admits = source(f"{ADDER}.add_chunked_req")
    return "extend_batch_idx < 2" in evicts and "return req\n" in admits and "evict" not in admits


FIX = Fix(
    id="parked-chunk",
    title="a prompt that waits for its next chunk gives back what lies behind its window",
    seed="none; reported upstream",
    upstream="#36458 (open); 0.5.23 has the bug",
    needs=">=0.5.12",
    still_broken=still_broken,
    hooks=(
        around("adder.add_chunked", around_add_chunked),
        before("batch.prepare_for_extend", before_prepare),
        around("batch.check_decode_mem", around_check),
    ),
    purpose="correctness",
)
