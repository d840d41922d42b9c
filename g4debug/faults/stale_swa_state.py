"""Puts the draft's trtllm_mha backend into the state that an upstream bug left it in.

Since upstream #25103 (2026-05-15, a repair for EAGLE drafts with a pool of their own) the backend
decided once, in ``__init__``, from ``model_runner.token_to_kv_pool``, whether there is a SWA pool.
For the FROZEN_KV_MTP draft that is a dummy pool of 64 tokens, so it kept
``use_sliding_window_kv_pool=False, _swa_kv_pool=None``. Released SGLang asks the allocator instead.
So this fault sets these attributes, on draft runners only, right after the backend is built
and before any graph is captured. From 0.5.14 on the backend also keeps the mapping from full to SWA
slots for its graphs, which is None where there is no SWA pool; the fault sets that, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    def after_init(result: Any, backend: Any, model_runner: Any, *args: Any, **kw: Any) -> Any:
        if getattr(model_runner, "is_draft_worker", False) and injection.fire(runner="draft"):
            backend.use_sliding_window_kv_pool = False
            backend._swa_kv_pool = None
            if hasattr(backend, "_swa_full_to_swa_mapping"):
                backend._swa_full_to_swa_mapping = None
            injection.log("draft backend: use_sliding_window_kv_pool=False, _swa_kv_pool=None")
        return result

    hooks.after("attn.trtllm_mha.init", Order.FAULT, injection.fault.id, after_init)


FAULT = Fault(
    id="stale-swa-state",
    title="the draft's attention backend does not know that its pool is a SWA pool",
    tasks={"on": "set the stale state on the draft's backend"},
    caught_by=("page-table",),
    install=install,
    selectors=("runner",),
    recreates="swa-state-swap",
)
