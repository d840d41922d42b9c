"""SGLang's missing barrier is replaced: in frozen-kv-mtp-v2 the streams wait for each other."""

from __future__ import annotations

from typing import Any

from g4debug.fixes.base import state_of
from g4debug.hooking.resolved import server_argument
from g4debug.speculation.before_0_5_14.frozen_kv_mtp import ADAPTER, V2_PATH


def waits_as_well(server_args: Any) -> bool:
    """True on a server with overlap scheduling that speculates by the path frozen-kv-mtp-v2."""
    algorithm = server_argument(server_args, "speculative_algorithm")
    return bool(algorithm == ADAPTER.name) and state_of(V2_PATH) == "applied"
