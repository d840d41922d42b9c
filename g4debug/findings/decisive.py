"""The environment variables of SGLang by which its host decides where KV pages go.

A tape holds those that are set, and a replay gets the same values and no others. A test reads
SGLang's sources: it knows every variable that scheduler, prefix caches, allocators and speculative
workers read there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

LPM_CHECK = "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD"
LPM_TOKENS = "IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD"
DECISIVE = frozenset(
    {
        LPM_CHECK,
        LPM_TOKENS,
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
        "SGLANG_DEBUG_MEMORY_POOL",
        "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP",
        "SGLANG_ENABLE_SPEC_V2",
        "SGLANG_ENABLE_UNIFIED_RADIX_TREE",
        "SGLANG_ENABLE_WAITING_PREFIX_REFRESH",
        "SGLANG_EXACT_CHUNK_FILL",
        "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
        "SGLANG_INIT_NEW_TOKEN_RATIO",
        "SGLANG_MAX_NEW_TOKENS_LIMIT",
        "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
        "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
        "SGLANG_OPT_RELEASE_PREFILL_SWA",
        "SGLANG_OPT_SWA_EVICT_DROP_PAGE_MARGIN",
        "SGLANG_OPT_SWA_RADIX_CACHE_COMPACT",
        "SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW",
        "SGLANG_OPT_SWA_SPLIT_LEAF_ON_INSERT",
        "SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS",
        "SGLANG_PREFILL_DELAYER_MAX_DELAY_PASSES",
        "SGLANG_PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE",
        "SGLANG_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK",
        "SGLANG_PREFILL_TILE_BUDGET",
        "SGLANG_PREFILL_TILE_BUDGET_MODE",
        "SGLANG_RADIX_FORCE_MISS",
        "SGLANG_RETRACT_DECODE_STEPS",
        "SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE",
        "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND",
        "SGLANG_SWA_EVICTION_INTERVAL",
        "SGLANG_SWA_EVICTION_INTERVAL_MULTIPLIER",
        "SGLANG_TEST_RETRACT",
        "SGLANG_TEST_RETRACT_INTERVAL",
        "SGLANG_TEST_RETRACT_NO_PREFILL_BS",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND",
    }
)
# What they decide is on the tape: how many tokens a verify accepts, in which round a request comes.
# A replay does not set them, or they would decide a second time.
ON_TAPE = frozenset(
    {
        "SGLANG_SCHEDULER_MAX_RECV_PER_POLL",
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE",
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT",
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_NONE",
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY",
        "SGLANG_SIMULATE_ACC_GREEDY",
        "SGLANG_SIMULATE_ACC_LEN",
        "SGLANG_SIMULATE_ACC_METHOD",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE",
    }
)
# They end requests after some seconds. From 0.5.23 on that is an abort as any other.
SECONDS = ("SGLANG_REQ_RUNNING_TIMEOUT", "SGLANG_REQ_WAITING_TIMEOUT")
# With these a scheduler gets its requests on a way on which they were never taped.
OTHER_WAYS = frozenset({"SGLANG_RUST_SERVER", "SGLANG_TEST_SCRIPTED_RUNTIME"})
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]{1,32}")  # numbers, switches, and names of SGLang's own
_OFF = ("", "0", "false", "no", "n", "off")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The decisive variables that are set, with values that a tape can have."""
    found = {name: environ[name].strip() for name in sorted(DECISIVE & environ.keys())}
    return {name: value for name, value in found.items() if _PLAIN.fullmatch(value)}


def not_carried(environ: Mapping[str, str], polls: bool) -> Iterator[str]:
    """The variables that are set so that a tape cannot carry it, in words.

    polls: a request that is ended after some seconds gets an abort, as in SGLang from 0.5.23 on.
    """
    for name in sorted(DECISIVE & environ.keys()):
        if name not in variables(environ):
            yield f"the value of {name}, which is no number, switch or short name"
    for name in SECONDS:
        if not polls and _number(environ.get(name, "")) > 0:
            yield f"requests that are ended after some seconds ({name})"
    for name in sorted(OTHER_WAYS):
        if environ.get(name, "").strip().lower() not in _OFF:
            yield f"requests that come on another way ({name})"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
