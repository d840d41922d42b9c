"""SGLang's pool solve: KV memory and a ratio in, tokens of the full and the SWA pool out.

Our own writing of ``HybridSWAPoolConfigurator`` (SGLang 0.5.12.post1 to 0.5.15.post1,
``model_executor/pool_configurator.py``)::

    cell = F * n_full + ratio * S * n_swa          bytes per token of the full pool
    full = page_floor(memory // cell)              tokens
    swa  = page_floor(int(full * ratio))           tokens

with F and S the bytes of one token in one full and one sliding layer. The arithmetic is in
floats, in SGLang's order: the tests compare the two to the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4debug.pools.config import KVGeometry


@dataclass(frozen=True)
class Memory:
    """``kv_bytes``: bytes for KV on one GPU (after weights); ``element``: bytes per KV element."""

    kv_bytes: int
    page: int = 64
    tp: int = 1
    element: int = 2


@dataclass(frozen=True)
class Pools:
    """Sizes in tokens, whole pages."""

    ratio: float
    full: int
    swa: int


def cell_bytes(geometry: KVGeometry, memory: Memory, ratio: float) -> float:
    """Bytes per token of the full pool, its share of the SWA pool included."""
    full = geometry.full_bytes(memory.tp, memory.element)
    swa = geometry.swa_bytes(memory.tp, memory.element)
    return full * geometry.full_layers + ratio * swa * geometry.swa_layers


def solve(geometry: KVGeometry, memory: Memory, ratio: float) -> Pools:
    """Both pools for ``swa_full_tokens_ratio=ratio``. Raises ValueError unless 0 < ratio <= 1."""
    if not 0 < ratio <= 1:
        raise ValueError(f"got ratio {ratio}, expected 0 < ratio <= 1")
    tokens = int(memory.kv_bytes // cell_bytes(geometry, memory, ratio))
    full = tokens // memory.page * memory.page
    return Pools(ratio, full, int(full * ratio) // memory.page * memory.page)


def bytes_of(geometry: KVGeometry, memory: Memory, pools: Pools) -> int:
    """Bytes that the tokens of both pools take (SGLang adds one page to each layer's buffer)."""
    full = geometry.full_bytes(memory.tp, memory.element) * geometry.full_layers
    swa = geometry.swa_bytes(memory.tp, memory.element) * geometry.swa_layers
    return pools.full * full + pools.swa * swa
