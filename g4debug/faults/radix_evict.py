"""Lets the prefix cache evict before a step.

This is a stress test: what a running request has locked must stay.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults.base import Fault, Injection
from g4debug.hooking.prefix_sharing import keeps_prefixes


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run_batch(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if not keeps_prefixes(scheduler.tree_cache):
            return  # such a cache keeps nothing
        action = injection.fire()
        if action is None:
            return
        tokens = injection.fault.number_of(action)
        before = scheduler.token_to_kv_pool_allocator.available_size()
        scheduler.tree_cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=tokens))
        gained = scheduler.token_to_kv_pool_allocator.available_size() - before
        injection.log(f"asked for {tokens} tokens of each pool, {gained} became free in both")


FAULT = Fault(
    id="radix-evict",
    title="the prefix cache evicts before a step, as it does under load",
    tasks={"on": "evict as many tokens as the argument says"},
    caught_by=(),
    asks=("a prefix cache",),
    arguments=("on",),
    counts="a number of tokens",
    default=256,
    drills=("5*on",),
)
