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

The fix acts where a prompt has been parked since its last chunk was launched. So it changes nothing
on a server that parks no chunk, neither its answers nor how its prompts are cut. One that would
have got on by itself, when others end, computes the chunk earlier: requests share other batches
then, which changes log-probabilities in their last bits. To wait until nothing else runs would not
do that, but others may come for ever, and up to 0.5.15 a request that decodes may be killed.

Why no forward needs these pages: under overlap scheduling, a round launches its batch and then
waits for the result of the batch before it. The round that parks the prompt launches none of its
chunks, and waits for the last one that was launched. In the next round all KV of the prompt is
written, and the next to read it is the chunk that begins at ``begin``, with a window that reaches
back from there. Without overlap scheduling each round waits for its own batch. A draft reads from
the prompt's end on, which is later. What other requests read is theirs: without a prefix cache
nobody shares pages, and with one each has its own lock. With pipeline parallelism a chunk may still
be in flight, and with disaggregation these pages may still have to be sent. It was never run with
either, so it does nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

from g4debug.fixes import _window_lock
from g4debug.fixes.base import Fix, around, before
from g4debug.fixes.paths.base import arguments
from g4debug.fixes.source import source
from g4debug.hooking import req_kv
from g4debug.hooking.prefix_sharing import keeps_prefixes

BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
# Requests that were parked since their last chunk was launched, and those that have given back.
_parked: WeakSet[Any] = WeakSet()
_gave: WeakSet[Any] = WeakSet()


def around_add_chunked(
    call_next: Callable[..., Any], adder: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``PrefillAdder.add_chunked_req``, which returns the request if its prompt goes on."""
    if request in _parked and request not in _gave:
        _gave.add(request)
        give_back(adder.tree_cache, adder.token_to_kv_pool_allocator, request)
    goes_on = call_next(adder, request, *args, **kwargs)
    if goes_on is request and not any(r is request for r in adder.can_run_list):
        _parked.add(request)
    return goes_on


def before_prepare(batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``ScheduleBatch.prepare_for_extend``: the batch is launched in this round."""
    if _parked:
        _parked.difference_update(batch.reqs)
        _gave.difference_update(batch.reqs)


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
    tree.checkpoint(request, up_to=req_kv.prefix(request))
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
    ),
    purpose="correctness",
)
