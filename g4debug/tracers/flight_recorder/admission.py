"""Says which check of SGLang's keeps a request out of the next batch, from SGLang's own figures.

SGLang makes a new ``PrefillAdder`` in each round that has something to admit, and that reads pools,
prefix cache and running requests. Here one is made, too, of the same values, and asked for what is
left; nothing is admitted, locked or allocated. Its checks are made again in SGLang's order. To be
called in the scheduler's main thread, between two of its rounds: then the figures are those that
SGLang decided by. Only host memory is read.
"""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

from g4debug.hooking import prefix_tree, req_kv
from g4debug.tracers.flight_recorder import gates
from g4debug.tracers.flight_recorder.work import Place, Work

FULL, SWA, ROWS, NOT_KNOWN = "full", "swa", "rows", ""
NAMES = {FULL: "full pool", SWA: "SWA pool"}


@dataclass(frozen=True)
class Refusal:
    """words: the check, with its figures. pool: ``FULL``, ``SWA``, ``ROWS``, or not known.

    lacks: tokens that would have to be freed for the request to go on, or rows. most: what the pool
    could have at best, -1 if not known. at_least: what would have to be available. by_lock: the
    tokens are there, but in its own cached prefix, which SGLang locks before it asks. by_page: the
    pool has room for its prompt and its answer, but not for a page that SGLang counts besides.
    """

    words: str
    pool: str = NOT_KNOWN
    lacks: int = 0
    at_least: int = 0
    most: int = -1
    by_lock: bool = False
    by_page: bool = False

    @property
    def never(self) -> bool:
        """True if not even an empty pool has so much."""
        return 0 <= self.most < self.at_least


@dataclass(frozen=True)
class _Left:
    """What is left for new tokens in each pool, evictable ones counted. swa: None without one.

    kept: what is kept for what the running requests may still generate.
    """

    full: float
    now: float
    swa: int | None
    kept: float
    page: int
    chunk: int | None
    adder: Any

    def __str__(self) -> str:
        swa = "" if self.swa is None else f", {self.swa} of the SWA pool"
        chunk = "" if self.chunk is None else f"; the chunk is {self.chunk} tokens"
        return f"left are {int(self.full)} tokens of the full pool{swa}{chunk}"


def refusal(scheduler: Any, item: Work) -> Refusal:
    """The check that keeps a request out of the next batch."""
    if item.place is Place.RUNS:
        return Refusal("not known: it is one of the running requests, and gets no token")
    if item.place is Place.GRAMMAR:
        return Refusal(gates.grammar(scheduler, item.request))
    if item.place is not Place.QUEUE and item.place is not Place.CHUNK:
        return Refusal(item.place.value)
    left = _left(scheduler)
    if item.place is Place.CHUNK:
        return _of_chunk(scheduler, item.request, left)
    return _of_queued(scheduler, item.request, left)


def _left(scheduler: Any) -> _Left:
    running = scheduler.running_batch
    make = getattr(scheduler, "get_prefill_adder_class", None)
    of = make() if make else sys.modules[type(scheduler).__module__].PrefillAdder
    tracker = getattr(scheduler, "new_token_ratio_tracker", None)
    adder = of(
        scheduler.page_size,
        scheduler.tree_cache,
        scheduler.token_to_kv_pool_allocator,
        running,
        scheduler.new_token_ratio if tracker is None else tracker.current,
        scheduler.max_prefill_tokens,
        scheduler.chunked_prefill_size,
        len(running.reqs) if scheduler.is_mixed_chunk else 0,
        scheduler.priority_scheduling_preemption_threshold,
    )
    budget = getattr(adder, "memory_budget", None)  # from 0.5.21 on
    swa = None
    if adder.is_hybrid_swa:
        swa = int(adder.rem_swa_tokens if budget is None else budget.remaining_swa)
    kept = adder.rem_total_token_offset if budget is None else budget.total_offset
    return _Left(
        float(adder.rem_total_tokens),
        float(adder.cur_rem_tokens),
        swa,
        float(kept),
        int(adder.page_size),
        adder.rem_chunk_tokens,
        adder,
    )


def _of_chunk(scheduler: Any, request: Any, left: _Left) -> Refusal:
    """``add_chunked_req``: on a hybrid model, a chunk waits until a token of it has room."""
    rest = _length(request) - req_kv.prefix(request)
    needs = rest if left.chunk is None else min(rest, left.chunk)
    if left.swa is not None and left.swa - left.page <= 0:
        return Refusal(
            f"SWA pool: needs {needs} for its next chunk, has {max(left.swa, 0)}, and one page "
            f"({left.page}) of that is kept free",
            SWA,
            left.page + 1 - left.swa,
            left.page + 1,
            size(scheduler, SWA),
        )
    if left.swa is not None and left.full <= 0:
        return _full(scheduler, needs, 1, left, None, "for its next chunk")
    return Refusal(f"not known: its next chunk is {needs} tokens; {left}")


def _of_queued(scheduler: Any, request: Any, left: _Left) -> Refusal:
    """``get_new_batch_prefill`` and ``add_one_req``.

    A batch counts as full after a refusal, for want of rows or of memory. With a SWA pool, and
    where SGLang may retract a request for one of a higher priority, it asks anew in each round.
    """
    found, running = _if_asked(scheduler, request, left), scheduler.running_batch
    full = getattr(running, "batch_is_full", False) and running.reqs
    if not full or left.swa is not None or getattr(scheduler, "enable_priority_preemption", False):
        return found
    words = (
        f"SGLang asks for no request until one of the {len(running.reqs)} running ones ends: "
        "the batch counts as full"
    )
    if found.words.startswith("not known"):
        return Refusal(f"{words}; {left}")
    return replace(found, words=f"{found.words}; {words}")


def _if_asked(scheduler: Any, request: Any, left: _Left) -> Refusal:
    running = scheduler.running_batch
    rows = scheduler.get_num_allocatable_reqs(len(running.reqs))
    if words := gates.few_slots(scheduler, rows):
        return Refusal(words)
    if rows <= 0 and getattr(scheduler, "enable_priority_preemption", False):
        return Refusal(gates.priority(scheduler, request))
    if rows <= 0:
        return Refusal(
            f"request rows: needs 1, has 0; {len(running.reqs)} requests run", ROWS, 1, 1
        )
    if words := gates.lora(scheduler, request) or gates.beams(scheduler, request):
        return Refusal(words)
    adder, tree = left.adder, scheduler.tree_cache
    extend = _length(request) - req_kv.prefix(request)
    clip = getattr(sys.modules[type(adder).__module__], "CLIP_MAX_NEW_TOKENS", 4096)
    new = min(max(request.sampling_params.max_new_tokens - len(request.output_ids), 0), clip)
    paged = -(-extend // left.page) * left.page
    overhead = getattr(adder, "per_req_token_overhead", left.page)
    at_once = bool(request.sampling_params.ignore_eos and getattr(tree, "disable", True))
    reserve, slots = _slots(adder, request, at_once)
    if slots is not None:
        return slots
    locks = prefix_tree.unlocked_above(tree, getattr(request, "last_node", None))
    if at_once:
        old = not hasattr(adder, "per_req_token_overhead")
        needs = paged + reserve + (0 if old else overhead)
        has = min(left.full, left.now)
        if needs > has:
            return _full(scheduler, needs, needs, left, None, f"for {extend} tokens")
        locks = prefix_tree.Unlocked(0, 0)
        if left.swa is None:
            ends = _ends(scheduler, request, extend, needs, 0 if old else overhead, left)
            if ends is not None:
                return ends
    else:
        needs = extend + new + overhead + reserve
        if needs >= left.full - locks.full:
            what = f"for {extend} tokens, and {new} that it may generate"
            return _full(scheduler, needs, needs + 1, left, locks, what)
    if left.swa is not None:
        needs, least = _swa_needs(left, extend, new, at_once)
        has = left.swa - locks.swa
        if has < least:
            held = ""
            if locks.swa:
                held = f"; {left.swa} are free or evictable, but {_prefix_words(locks, locks.swa)}"
            return Refusal(
                f"SWA pool: needs {needs} for {extend} tokens, has {max(has, 0)}{held}",
                SWA,
                least - has,
                least,
                size(scheduler, SWA),
                left.swa >= least,
            )
    delay = gates.delayed(scheduler)
    return Refusal(
        f"not known: it needs {extend} tokens, and {new} that it may generate; {left}"
        + (f"; {delay}" if delay else "")
    )


def _slots(adder: Any, request: Any, at_once: bool) -> tuple[int, Refusal | None]:
    """Tokens that are kept for what else a request takes of the full pool, and the refusal if there
    is no slot for its state of linear layers: they share a pool's bytes on some servers."""
    cost = getattr(adder, "_mamba_slot_cost", 0)
    ask = getattr(adder, "_request_slot_reserve_for_req", None)
    other = int(ask(request)) if ask is not None else 0
    if not cost:
        return other, None
    budget = adder._mamba_gap_budget_for_req
    checked = "include_host_hit" in inspect.signature(budget).parameters  # 0.5.23
    reserve = int(
        budget(request, **({"include_host_hit": True} if checked and not at_once else {}))
    )
    needs, has = reserve // cost, getattr(adder, "rem_mamba_slots", None)
    if at_once or not checked or has is None or needs <= has:
        return reserve + other, None
    words = (
        f"mamba slots: needs {needs} for its state of linear layers, has {max(int(has), 0)} that "
        "are free or evictable; each running request holds one or more"
    )
    return reserve + other, Refusal(words)


@dataclass(frozen=True)
class _Answer:
    """of: a request. rest: the tokens that it is expected to generate yet. gives: what is free
    again when it has ended, as SGLang counts that."""

    of: Any
    rest: float
    gives: int


def _answer(request: Any, ratio: float) -> _Answer:
    sampling, done = request.sampling_params, len(request.output_ids)
    share = 1.0 if sampling.ignore_eos else ratio
    return _Answer(request, sampling.max_new_tokens * share - done, _length(request))


def _ends(
    scheduler: Any, request: Any, extend: int, asked: int, page: int, left: _Left
) -> Refusal | None:
    """``add_one_req_ignore_eos``: whether each request can reach its end, the shortest rest first.

    asked: tokens for the prompt, with the page that is counted for each request. On a hybrid model
    SGLang does not ask that.
    """
    ratio = left.adder.new_token_ratio
    some = [request, *scheduler.running_batch.reqs]
    answers = sorted((a for r in some if (a := _answer(r, ratio)).rest > 0), key=lambda a: a.rest)
    has = left.now
    for n, answer in enumerate(answers):
        many = len(answers) - n
        least = asked + math.floor((answer.rest + 1) * many) + 1
        if least > has:
            break
        has += answer.gives
    else:
        return None
    words = (
        f"full pool: needs {least} for {extend} tokens and the {math.ceil(answer.rest)} that it "
        f"will generate, has {max(int(has), 0)}"
        if many == 1 and answer.of is request
        else f"full pool: needs {least} for {extend} tokens and {math.ceil(answer.rest)} more of "
        f"each of {many} requests, has {max(int(has), 0)} then"
    )
    words += " (SGLang asks that of a request with ignore_eos, without a prefix cache)"
    whole, mine = size(scheduler, FULL), _answer(request, ratio).rest
    alone = asked + math.floor(mine + 1) + 1 if mine > 0 else 0
    if alone > whole:
        return Refusal(words, FULL, alone - whole, alone, whole, by_page=alone - page <= whole)
    return Refusal(words, FULL, least - int(has), least)


def _swa_needs(left: _Left, extend: int, new: int, at_once: bool) -> tuple[int, int]:
    """What a request asks of the SWA pool, and how much must be available at the least."""
    adder = left.adder
    budget = getattr(adder, "memory_budget", None)
    if budget is None:
        if "max_new_tokens" not in inspect.signature(adder._swa_budget_for_req).parameters:
            needs = int(adder._swa_budget_for_req(extend))
            return needs, needs + (not at_once)
        paged = extend if at_once else int(adder.ceil_paged_tokens(extend))  # 0.5.18
        needs = int(adder._swa_budget_for_req(paged, new))
        if not at_once and left.chunk is not None and adder._swa_req_never_fits(paged, new):
            needs = int(adder._swa_reserved_tokens(0, new)) + left.page  # a smaller chunk will do
            return needs, needs
        return needs, needs + (not at_once)
    paged = extend if at_once else int(adder.ceil_paged_tokens(extend))
    needs = int(budget.swa_tokens(paged, new, chunk_limit=left.chunk))
    if not at_once and budget.swa_never_fits(paged, new, chunk_limit=left.chunk):
        needs = int(budget.swa_tokens(0, new)) + left.page  # a smaller chunk will do
        return needs, needs
    return needs, needs + (not at_once and not budget.req_ring)


def _full(
    scheduler: Any,
    needs: int,
    least: int,
    left: _Left,
    locks: prefix_tree.Unlocked | None,
    what: str,
) -> Refusal:
    locked = 0 if locks is None else locks.full
    has = left.full - locked
    words = f"full pool: needs {needs} {what}, has {max(int(has), 0)}"
    if left.kept >= 1:
        words += (
            f"; {int(left.kept)} more are kept for what the running requests may still generate "
            "(new-token estimate)"
        )
    if locks is not None and locked:
        words += f"; {_prefix_words(locks, locked)}"
    lacks = math.ceil(least - has)
    by_lock = locked > 0 and left.full > needs
    return Refusal(words, FULL, lacks, least, size(scheduler, FULL), by_lock)


def _prefix_words(locks: prefix_tree.Unlocked, tokens: int) -> str:
    return (
        f"{'' if locks.exact else 'up to '}{tokens} of them are the cached prefix of the request "
        "itself, which SGLang locks before it asks"
    )


def size(scheduler: Any, pool: str) -> int:
    """The tokens of a pool, -1 if not known."""
    allocator = scheduler.token_to_kv_pool_allocator
    return int(getattr(allocator, f"size_{pool}", -1 if pool == SWA else allocator.size))


def available(scheduler: Any, pool: str) -> int:
    """The free tokens of a pool, without the evictable ones."""
    allocator = scheduler.token_to_kv_pool_allocator
    ask = getattr(allocator, f"{pool}_available_size", allocator.available_size)
    return int(ask())


def position(scheduler: Any, request: Any) -> int:
    """How many requests are before it in the queue, as the policy has sorted it."""
    return next((i for i, r in enumerate(scheduler.waiting_queue) if r is request), 0)


def _length(request: Any) -> int:
    return len(request.origin_input_ids) + len(request.output_ids)
