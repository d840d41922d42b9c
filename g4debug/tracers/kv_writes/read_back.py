"""Gives the checked locations to layers without KV of their own, which read by them.

E2B's and E4B's last layers share the KV of earlier ones, so SGLang gives them no K and V. In a
prefill or a verify, ``TritonAttnBackend.forward_extend`` then reads the KV of the new tokens back
from the pool, by the locations that it was written to (``out_cache_loc``; in sliding layers what
SGLang's mapping says of it, or from 0.5.18 on the metadata's ``swa_out_cache_loc``). One that the
pool does not have ends in a device-side assert of torch's index kernel, and the CUDA context is
lost. So such a layer gets the locations that the writes got.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from g4debug.tracers.kv_writes.checked_writes import CheckedWrites

# (the object with the locations, the attribute, SGLang's locations, the checked ones)
Places = list[tuple[Any, str, torch.Tensor, torch.Tensor]]


def shares(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if ``AttentionBackend.forward(q, k, v, layer, forward_batch, ...)`` is given no K."""
    return (args[1] if len(args) > 1 else kwargs.get("k")) is None


def places(backend: Any, batch: Any, checks: Iterable[CheckedWrites]) -> Places:
    """Where a layer finds the locations of this forward that were checked.

    checks: the latest ones of this backend, of either pool.
    """
    found: Places = []
    metadata = getattr(backend, "forward_metadata", None)
    for checked in checks:
        for owner, name in ((batch, "out_cache_loc"), (metadata, "swa_out_cache_loc")):
            loc = getattr(owner, name, None)
            if loc is not None and checked.batch is batch and checked.has(loc):
                found.append((owner, name, loc, checked.out))
    return found


def call(found: Places, function: Callable[[], Any]) -> Any:
    """Call it with the checked locations. SGLang's are put back, whatever it does."""
    try:
        for owner, name, _, checked in found:
            setattr(owner, name, checked)
        return function()
    finally:
        for owner, name, loc, _ in found:
            setattr(owner, name, loc)
