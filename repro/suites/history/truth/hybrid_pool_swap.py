"""Counts the uses of a HybridAttnBackend while it shows another KV pool than its runner's.

The draft shows the target's pool by setting ``token_to_kv_pool`` of its backend for a while
(``frozen_kv_mtp_utils.py``). One of the two backends inside computes (``_select_backend``).
It has to have that pool, too. There is no upstream fix: the bug is in 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.history.counter import Counter, around


def install(counter: Counter) -> None:
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    @around(HybridAttnBackend, "_select_backend")
    def select(hybrid: Any, *args: Any, **kwargs: Any) -> Callable[[Any], None] | None:
        if hybrid.token_to_kv_pool is hybrid.model_runner.token_to_kv_pool:
            return None
        counter.reached()

        def selected(inner: Any) -> None:
            if inner.token_to_kv_pool is not hybrid.token_to_kv_pool:
                name = type(inner).__name__
                counter.triggered(f"{name} computes on the draft's own pool, not on the target's")

        return selected
