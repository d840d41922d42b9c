"""How this SGLang speculates: what FROZEN_KV_MTP is called, and which of its two workers it has."""

from __future__ import annotations

from typing import Any

from g4debug.hooking import targets

V2_PATH = "frozen-kv-mtp-v2"  # FROZEN_KV_MTP with overlap scheduling on 0.5.12.post1


def is_frozen_kv_mtp(holder: Any) -> bool:
    """True for a scheduler, a batch or a ModelRunner of FROZEN_KV_MTP.

    The server's arguments do not tell: in 0.5.23 they stay as they were typed (NEXTN).
    """
    algorithm = getattr(holder, "spec_algorithm", None)
    return algorithm is not None and bool(algorithm.is_frozen_kv_mtp())


def is_v2() -> bool:
    """True if this SGLang has speculative decoding v2 only: its worker makes no seed step.

    False where no SGLang is installed.
    """
    return targets.sglang_version() is not None and targets.path("worker.seed_step") is None
