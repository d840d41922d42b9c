"""Puts the draft's attention backend into the state that an upstream bug left it in.

Since upstream #25103 (2026-05-15, a repair for EAGLE drafts with a pool of their own) trtllm_mha
decided once, in ``__init__``, from ``model_runner.token_to_kv_pool``, whether there is a SWA pool.
For the FROZEN_KV_MTP draft that is a dummy pool of 64 tokens, so it kept
``use_sliding_window_kv_pool=False, _swa_kv_pool=None``. Released SGLang asks the allocator instead.
So this fault sets these attributes (``Adapter.without_swa``), on draft runners only, right after
the backend is built and before any graph is captured.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from g4debug.backends import adapters
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    from g4debug.backends.base import Adapter


def install(injection: Injection) -> None:
    def after_init(
        adapter: Adapter, result: Any, backend: Any, model_runner: Any, *args: Any, **kw: Any
    ) -> Any:
        if getattr(model_runner, "is_draft_worker", False) and injection.fire(runner="draft"):
            for name, value in adapter.without_swa.items():
                if hasattr(backend, name):
                    setattr(backend, name, value)
            injection.log(f"draft backend: {adapter.swa_state(backend)}")
        return result

    for adapter in adapters():
        if adapter.without_swa:
            injection.after(adapter.built)(partial(after_init, adapter))


FAULT = Fault(
    id="stale-swa-state",
    title="the draft's attention backend does not know that its pool is a SWA pool",
    tasks={"on": "set the stale state on the draft's backend"},
    caught_by=("page-table",),
    asks=("a draft", "a SWA pool"),
    selectors=("runner",),
    recreates="swa-state-swap",
)
