"""Computes the sizes of the full pool and the SWA pool from KV memory and a ratio, as SGLang does.

It follows ``HybridSWAPoolConfigurator`` (SGLang 0.5.12.post1 to 0.5.23,
``model_executor/pool_configurator.py``), in our own code, and leaves out the draft's layers, for
which 0.5.15 and later put memory aside, too::

    cell = F * n_full + ratio * S * n_swa          bytes per token of the full pool
    full = page_floor(memory // cell)              tokens
    swa  = page_floor(int(full * ratio))           tokens

F and S are the bytes of one token in one full layer and in one sliding layer. The code uses floats
and SGLang's order; the tests check that every page is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4debug.pools.config import KVGeometry


@dataclass(frozen=True)
class Memory:
    """kv_bytes: memory for KV on one GPU, without weights. element: bytes of one KV element."""

    kv_bytes: int
    page: int = 64
    tp: int = 1
    element: int = 2


@dataclass(frozen=True)
class Pools:
    """Sizes in tokens. They are whole pages."""

    ratio: float
    full: int
    swa: int


def cell_bytes(geometry: KVGeometry, memory: Memory, ratio: float) -> float:
    """Bytes for one token of the full pool, including its share of the SWA pool."""
    full = geometry.full_bytes(memory.tp, memory.element)
    swa = geometry.swa_bytes(memory.tp, memory.element)
    return full * geometry.full_layers + ratio * swa * geometry.swa_layers


def solve(geometry: KVGeometry, memory: Memory, ratio: float) -> Pools:
    """The pools with ``swa_full_tokens_ratio=ratio``. Raises ValueError unless 0 < ratio <= 1."""
    if not 0 < ratio <= 1:
        raise ValueError(f"got ratio {ratio}, expected 0 < ratio <= 1")
    tokens = int(memory.kv_bytes // cell_bytes(geometry, memory, ratio))
    full = tokens // memory.page * memory.page
    return Pools(ratio, full, int(full * ratio) // memory.page * memory.page)


def bytes_of(geometry: KVGeometry, memory: Memory, pools: Pools) -> int:
    """Bytes for the tokens of both pools. (SGLang adds one page to the buffer of each layer.)"""
    full = geometry.full_bytes(memory.tp, memory.element) * geometry.full_layers
    swa = geometry.swa_bytes(memory.tp, memory.element) * geometry.swa_layers
    return pools.full * full + pools.swa * swa
