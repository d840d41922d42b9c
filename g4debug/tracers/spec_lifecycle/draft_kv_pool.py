"""The hand-over in each forward of the draft: the KV pool that it computes on is the target's.

A draft that has no KV has a dummy pool of its own, and reads the target's. For the time of a
forward SGLang sets ``token_to_kv_pool`` of the draft's attention backend to the target's pool. With
different backends for prefill and decode that is a ``HybridAttnBackend``, which computes nothing:
one of the two backends inside it computes. If that one keeps the dummy, the draft dies where a
layer number of the target is none of the dummy's, and else reads the wrong KV and says nothing.
"""

from __future__ import annotations

from typing import Any

from g4debug import speculation
from g4debug.hooking.arguments import argument
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.check import check_pool
from g4debug.tracers.spec_lifecycle.log import SpecLog

SITES = ("attn.hybrid_metadata", "attn.hybrid_metadata_out_graph")
POOL = "token_to_kv_pool"


class ShownPool:
    def __init__(self, context: Context, log: SpecLog) -> None:
        self.context = context
        self.log = log

    def install(self) -> None:
        for site in SITES:
            self.context.before(site, self.before_metadata, optional=True)

    def before_metadata(self, hybrid: Any, *args: Any, **kwargs: Any) -> None:
        """Before each forward, and each capture of a CUDA graph."""
        runner, shown = hybrid.model_runner, getattr(hybrid, POOL, None)
        own = getattr(runner, POOL, None)
        draft = getattr(runner, "is_draft_worker", False)
        reads = draft and speculation.draft_reads_target_kv(runner)
        if shown is None or shown is own or not reads:
            return  # no view is in force
        batch = argument(args, kwargs, 0, "forward_batch")
        inner = hybrid._select_backend(batch.forward_mode)
        if not hasattr(inner, POOL):
            return
        pool = getattr(inner, POOL)
        violation = check_pool(
            right=pool is shown,
            backend=type(inner).__name__,
            which="its own" if pool is own else "another",
            wanted=getattr(shown, "size", None),
            got=getattr(pool, "size", None),
        )
        self.log.judge("attn.hybrid_metadata", None, violation)
