"""Lets the draft read the target's KV pool where prefill and decode have different backends.

From 0.5.13 on the KV pool is an attribute of the attention backend. The draft of FROZEN_KV_MTP
reads the target's KV by exchanging that attribute for a while: in ``frozen_kv_target_view``, in
``target_kv_pool_view`` and around its graph capture. With different backends for prefill and
decode, the draft's backend is a ``HybridAttnBackend``. It has the attribute but computes nothing,
and the two backends inside it keep the draft's own dummy pool of 64 tokens. That pool has as many
layers as the assistant, but the assistant asks for the *target's* layer numbers. So the first
forward of the draft dies of ``IndexError: list index out of range``; with CUDA graphs that is the
capture at start.

The fix makes ``HybridAttnBackend.token_to_kv_pool`` a property that also sets the attribute of the
two inner backends. Every exchange goes through that attribute, so all of them are then right, also
nested ones and those that are undone after an exception. Found by this project; not fixed upstream
yet.
"""

from __future__ import annotations

from typing import Any

from g4debug.fixes.base import Fix, after
from g4debug.fixes.source import source

ID = "hybrid-pool-swap"
HYBRID = "sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend"
VIEWS = "sglang.srt.speculative.frozen_kv_mtp_utils"
POOL = "token_to_kv_pool"


def inner_backends(backend: Any) -> tuple[Any, ...]:
    """The backends inside a HybridAttnBackend that have a KV pool as an attribute."""
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
    """Runs after ``HybridAttnBackend.__init__``. The first call makes the attribute a property."""
    cls = type(backend)
    if not isinstance(getattr(cls, POOL, None), property):
        setattr(cls, POOL, property(_get, _set, doc="the KV pool, also of the inner backends"))
    return result


def still_broken() -> bool:
    """True if the views exchange the backend's pool and a HybridAttnBackend does not pass it on."""
    swaps = f"draft_attn_backend.{POOL} =" in source(f"{VIEWS}.target_kv_pool_view")
    wrapper = source(HYBRID)
    return swaps and f"self.{POOL} =" in wrapper and f"def {POOL}" not in wrapper


FIX = Fix(
    id=ID,
    title="the draft reads the target's KV pool where prefill and decode have different backends",
    seed="none; found by this project on 0.5.14",
    upstream="no thread is known; every release from 0.5.13.post1 to 0.5.23 has the bug",
    needs=">=0.5.13",
    elsewhere={"<0.5.13": "the KV pool is not an attribute of the attention backend there"},
    still_broken=still_broken,
    hooks=(after("attn.hybrid_init", after_init),),
    purpose="correctness",
)
