"""How many requests each pool holds, which pool is too small, and the ratio that holds the most.

What a running request keeps in SGLang 0.5.12.post1 to 0.5.15.post1 (0.5.18 and later keep prompts
in another prefix cache, the unified one, which was not measured), where P is the page size, W is
the window - 1 (as SGLang counts it) and T is how many tokens one decode step can add:

* In the full pool it keeps all of its tokens, ``page_ceil(input + output + draft)``.
* In the SWA pool it keeps some of its own tokens. Every ``page_floor(max(P, W))`` decode steps the
  tokens behind the window are freed, up to one page before it (``maybe_evict_swa`` in
  ``schedule_batch.py``). So it keeps at most ``W + 2P + interval * T`` tokens, or all if it has
  fewer.
* In the SWA pool it also keeps its prompt. Without the radix cache the prompt is one part of its
  own tokens. With it the prompt belongs to the tree, and a running request locks *whole nodes* from
  the prompt's end until they cover the window (``inc_lock_ref`` in
  ``mem_cache/swa_radix_cache.py``). A node is as long as the prefill chunk that made it, so a whole
  chunk may be locked although the window is shorter. With ``SGLANG_OPT_SWA_SPLIT_LEAF_ON_INSERT=1``
  (off by default) only the window is locked, in whole pages.
* To be admitted, it needs ``max(min(input, chunk), W) + P`` free SWA tokens
  (``_swa_budget_for_req`` in ``schedule_policy.py``).

It is assumed that all requests are alike, share no prefix and run to their full length, and that
none is retracted. SGLang admits more than that, and then retracts some.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from g4debug.pools.config import KVGeometry
from g4debug.pools.solve import Memory, Pools, solve

DEFAULT_RATIO = 0.8  # ServerArgs.swa_full_tokens_ratio
MOE_RATIO = 0.15  # what the fix swa-ratio sets for a mixture of experts
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
STEP = 0.01


@dataclass(frozen=True)
class Workload:
    """``input``, ``output``: tokens of one request. ``concurrency``: requests at a time.

    ``chunk``: ``--chunked-prefill-size``, 0 for none. ``draft``: draft tokens of MTP, 0 for none.
    ``radix``: the radix cache is on. ``split_leaf``: SGLANG_OPT_SWA_SPLIT_LEAF_ON_INSERT is 1.
    """

    input: int
    output: int
    concurrency: int
    chunk: int = 8192
    draft: int = 0
    radix: bool = True
    split_leaf: bool = False


@dataclass(frozen=True)
class Need:
    """The tokens that one request keeps in each pool, and that must be free to admit it."""

    full: int
    swa: int
    swa_locked: int  # how many of ``swa`` are prompt tokens that are locked in the radix tree
    admit: int


@dataclass(frozen=True)
class Row:
    """One ratio. ``full_holds`` and ``swa_holds``: how many requests each pool holds."""

    pools: Pools
    full_holds: int
    swa_holds: int

    @property
    def ratio(self) -> float:
        return self.pools.ratio

    @property
    def holds(self) -> int:
        return min(self.full_holds, self.swa_holds)

    def binds(self, concurrency: int) -> str:
        """Which pool is too small for ``concurrency`` requests: full, swa, both, or none."""
        full, swa = self.full_holds < concurrency, self.swa_holds < concurrency
        return "both" if full and swa else "full" if full else "swa" if swa else "none"


@dataclass(frozen=True)
class Plan:
    geometry: KVGeometry
    memory: Memory
    workload: Workload
    need: Need
    rows: tuple[Row, ...]
    best: Row
    served: Row  # the ratio that SGLang takes if none is given, with the fix swa-ratio on
    reason: str
    hints: tuple[str, ...]


def plan(
    geometry: KVGeometry, memory: Memory, workload: Workload, ratios: Sequence[float] = ()
) -> Plan:
    """The table for ``ratios`` (default: RATIOS), and for the best ratio and SGLang's own."""
    need = need_of(geometry, memory, workload)
    best = _best(geometry, memory, need)
    served = row(
        geometry, memory, need, MOE_RATIO if geometry.moe and geometry.gemma else DEFAULT_RATIO
    )
    chosen = {round(x, 6) for x in (*(ratios or RATIOS), best.ratio, served.ratio)}
    rows = tuple(row(geometry, memory, need, x) for x in sorted(chosen))
    reason = _reason(best, served, workload.concurrency)
    hints = tuple(_hints(geometry, memory, workload, need, best))
    return Plan(geometry, memory, workload, need, rows, best, served, reason, hints)


def _best(geometry: KVGeometry, memory: Memory, need: Need) -> Row:
    """The ratio, in hundredths, with which the smaller of the two pools holds the most."""
    candidates = (row(geometry, memory, need, n * STEP) for n in range(1, round(1 / STEP) + 1))
    return max(candidates, key=lambda r: (r.holds, _room(r, need)))


def row(geometry: KVGeometry, memory: Memory, need: Need, ratio: float) -> Row:
    pools = solve(geometry, memory, round(ratio, 6))
    return Row(pools, pools.full // need.full, swa_holds(pools.swa, need))


def swa_holds(tokens: int, need: Need) -> int:
    """How many requests a SWA pool of ``tokens`` holds. The last one must be admitted, too."""
    last = max(need.swa, need.admit + 1)
    return 0 if tokens < last else 1 + (tokens - last) // need.swa


def need_of(geometry: KVGeometry, memory: Memory, workload: Workload) -> Need:
    page, window = memory.page, geometry.window - 1
    chunk = workload.chunk or workload.input
    interval = max(page, window) // page * page
    behind = page_ceil(window + 2 * page + interval * max(1, workload.draft), page)
    full = page_ceil(workload.input + workload.output + workload.draft, page)
    locked = 0
    own = full
    if workload.radix:
        cached = workload.input // page * page
        locked = locked_tokens(cached, chunk, window, page)
        if workload.split_leaf:
            locked = min(locked, page_ceil(window, page))
        own = page_ceil(workload.input - cached + workload.output + workload.draft, page)
    swa = locked + min(own, behind)
    return Need(full, swa, locked, max(min(workload.input, chunk), window) + page)


def locked_tokens(prompt: int, chunk: int, window: int, page: int) -> int:
    """How many SWA tokens of a prompt the tree keeps locked, on average over many such prompts.

    The prompts are cut into chunks of ``chunk`` tokens one after the other, so the cuts are at
    other places in each prompt. All numbers are multiples of the page size.
    """
    chunk = max(page, chunk // page * page)
    if prompt <= 0:
        return 0
    period = min(chunk // math.gcd(chunk, prompt), 1024)
    total = 0
    for n in range(period):
        begin, node_end = n * prompt, (n + 1) * prompt
        locked = 0
        while node_end > begin and locked < window:
            node_begin = max(begin, (node_end - 1) // chunk * chunk)
            locked += node_end - node_begin
            node_end = node_begin
        total += locked
    return page_ceil(-(-total // period), page)


def page_ceil(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


def _room(r: Row, need: Need) -> float:
    """How many requests the smaller pool holds, as a fraction. It decides between equal ratios."""
    return min(r.pools.full / need.full, r.pools.swa / need.swa)


def _reason(best: Row, served: Row, wanted: int) -> str:
    if not best.holds:
        return "no ratio holds even one request: give KV more memory, or shorten the requests"
    head = f"{best.ratio:g} holds {best.holds} requests, and no other ratio holds more"
    if served.holds >= best.holds:
        tail = f"; {served.ratio:g}, which SGLang takes by itself, holds as many: leave it"
    elif served.holds >= wanted:
        tail = f"; {served.ratio:g}, which SGLang takes by itself, holds your {wanted}, too"
    else:
        small, other = ("full", "SWA") if served.full_holds <= served.swa_holds else ("SWA", "full")
        tail = (
            f"; with {served.ratio:g}, which SGLang takes by itself, the {small} pool holds only "
            f"{served.holds}, while the {other} pool could hold "
            f"{max(served.full_holds, served.swa_holds)}"
        )
    if best.holds < wanted:
        tail += f". No ratio holds your {wanted}: some have to wait, or are retracted"
    return head + tail


def _hints(
    geometry: KVGeometry, memory: Memory, workload: Workload, need: Need, best: Row
) -> Iterator[str]:
    """Other remedies. Each hint is computed, not guessed."""
    if not best.holds:
        return
    window = page_ceil(geometry.window - 1, memory.page)
    if need.swa_locked > window:
        split = replace(workload, split_leaf=True)
        better = _best(geometry, memory, need_of(geometry, memory, split))
        if better.holds > best.holds:
            yield (
                f"the radix tree locks {need.swa_locked} SWA tokens of each prompt, though the "
                f"window needs only {window}; SGLANG_OPT_SWA_SPLIT_LEAF_ON_INSERT=1 locks only "
                f"{window}, and {better.holds} requests fit with the ratio {better.ratio:g}"
            )
