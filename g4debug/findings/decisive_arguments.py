"""The arguments of SGLang's server by which its host decides where KV pages go.

Those of ``AGAIN`` are on a tape, and a replay's server gets the same. Those of ``LIMITS`` switch on
what a tape cannot carry. Others that decide are on the tape as what became of them: the pools'
sizes, SGLang's own settings of its scheduler (``taping.SCHEDULER``), and when each request came and
what each verify accepted. A test reads SGLang's sources: it knows every argument that scheduler,
prefix caches, allocators and speculative workers read there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from g4debug.findings.record import Plain

AGAIN: Final = (
    "abort_on_priority_when_disabled", "allow_auto_truncate", "disable_priority_preemption",
    "min_free_slots_delay", "prefill_decode_interval", "prefill_decode_interval_min_bs",
    "prefill_max_requests",
)  # fmt: skip
# Argument -> the feature, in words.
LIMITS: Final[Mapping[str, str]] = {
    "disaggregation_mode": "disaggregation",
    "dllm_algorithm": "diffusion models",
    "enable_decoder_swa_bounded_replay": "a bounded replay of sliding windows",
    "enable_encoder_swa_bounded_replay": "a bounded replay of sliding windows",
    "enable_flexkv": "FlexKV",
    "enable_hierarchical_cache": "HiCache",
    "enable_hisparse": "HiSparse",
    "enable_kv_cache_sharding": "a KV cache that is divided among ranks",
    "enable_lmcache": "LMCache",
    "enable_pdmux": "PD multiplexing",
    "enable_prefill_delayer": "prefills that are put off by the clock (enable_prefill_delayer)",
    "enable_session_radix_cache": "a prefix cache of sessions",
    "enable_unified_cache_external_linker": "a cache that is linked from outside",
    "enable_unified_memory": "the unified memory pool",
    "prefill_only_disable_kv_cache": "prefills without a KV cache",
    "radix_cache_backend": "another prefix cache (radix_cache_backend)",
    "radix_eviction_policy_config": "an eviction policy with settings of its own",
    "speculative_adaptive": "drafts whose length changes (speculative_adaptive)",
    "strip_thinking_cache": "answers whose thinking is not kept in the prefix cache",
}
_OFF: tuple[object, ...] = (None, False, "null", "", {})
# A limit where more than one of them works, in words.
RANKS: Final[Mapping[str, str]] = {
    "attn_cp_size": "context-parallel ranks",
    "dcp_size": "decode-context-parallel ranks",
    "dp_size": "data-parallel ranks",
    "pp_size": "pipeline ranks",
}


def given(facts: Mapping[str, Plain]) -> dict[str, Plain]:
    """The arguments of ``AGAIN`` that a tape's scheduler had, as a replay's server takes them."""
    found = {name: facts.get(name) for name in AGAIN}
    return {name: value for name, value in found.items() if value}


def not_carried(value_of: Mapping[str, object]) -> list[str]:
    """The features that are on and that a tape cannot carry, in words. value_of: each argument."""
    found = [what for name, what in LIMITS.items() if value_of.get(name) not in _OFF]
    for name, what in RANKS.items():
        value = value_of.get(name)
        if isinstance(value, int) and value > 1:
            found.append(what)
    return list(dict.fromkeys(found))
