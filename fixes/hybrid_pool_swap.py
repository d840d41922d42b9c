"""The target-pool view reaches the backends inside a HybridAttnBackend (ours; not upstream yet).

From 0.5.13 on the KV pool is an attribute of the attention backend, and the draft of
FROZEN_KV_MTP reads the target's KV by swapping that one attribute for a while: in
``frozen_kv_target_view``, in ``target_kv_pool_view`` and around its graph capture. With
different backends for prefill and decode, the draft's backend is a ``HybridAttnBackend``,
which holds the attribute but computes nothing; the two backends inside it keep the draft's
own 64-token dummy pool. That pool has as many layers as the assistant; the assistant asks
for the *target's* layer numbers, so the first draft forward (with CUDA graphs: the capture,
at start) dies of ``IndexError: list index out of range``.

The fix: ``HybridAttnBackend.token_to_kv_pool`` becomes a property that sets the inner
backends' attribute, too. All three swaps, their restores on exceptions, and swaps within
swaps are then right, because they all go through that attribute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix
from g4debug.fixes.source import source

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks

ID = "hybrid-pool-swap"
HYBRID = "sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend"
VIEWS = "sglang.srt.speculative.frozen_kv_mtp_utils"
POOL = "token_to_kv_pool"


def inner_backends(backend: Any) -> tuple[Any, ...]:
    """The backends inside a HybridAttnBackend that hold a KV pool themselves."""
    found = (getattr(backend, name, None) for name in ("prefill_backend", "decode_backend"))
    return tuple(b for b in found if hasattr(b, POOL))


def _get(backend: Any) -> Any:
    try:
        return vars(backend)[POOL]
    except KeyError:
        raise AttributeError(f"{type(backend).__name__} has no {POOL} yet") from None


def _set(backend: Any, pool: Any) -> None:
    vars(backend)[POOL] = pool
    for inner in inner_backends(backend):
        setattr(inner, POOL, pool)


def after_init(result: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``HybridAttnBackend.__init__``; the first one makes the attribute a property."""
    cls = type(backend)
    if not isinstance(getattr(cls, POOL, None), property):
        setattr(cls, POOL, property(_get, _set, doc="KV pool, of the inner backends, too"))
    return result


def still_broken() -> bool:
    """True if the views swap the pool on the backend, and the wrapper keeps it to itself."""
    swaps = f"draft_attn_backend.{POOL} =" in source(f"{VIEWS}.target_kv_pool_view")
    wrapper = source(HYBRID)
    return swaps and f"self.{POOL} =" in wrapper and f"def {POOL}" not in wrapper


def apply(hooks: Hooks) -> None:
    from g4debug.hooking.hooks import Order

    hooks.after("attn.hybrid_init", Order.FIX, ID, after_init)


FIX = Fix(
    id=ID,
    title="the draft's view of the target's KV pool reaches split prefill and decode backends",
    seed="none: found by this project on 0.5.14",
    upstream="no thread known; in every release from 0.5.13.post1 to 0.5.23",
    needs=">=0.5.13",
    still_broken=still_broken,
    apply=apply,
)
