"""Proves that kv-integrity works: it must find a flipped bit, and a write into a freed page.

The tracer, its stamps and checksums, the ledger and its hooks, the trap and the dump are the real
ones. The allocator and the KV pool are stand-ins with SGLang's free list and buffers. No SGLang is
needed, and no server is touched.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.ledger.hooks import LedgerHooks
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.canary import PAGE_SIZE, PAGES, allocator, found, free, sound, take
from g4debug.tracers.kv_integrity.tracer import KvIntegrityTracer

LAYERS, HEADS, DIM = 3, 2, 16


def fire(folder: Path, device: torch.device) -> str:
    """Corrupt KV twice, expect two findings and dumps in ``folder``. Returns what was seen."""
    it = _Server(folder, device)
    with sound("sound KV"):
        tokens = it.alloc("before", 3)
        it.free(tokens)
        tokens = it.alloc("canary", 2)
        it.step()
    if it.ledger.broken or it.context.disabled:
        raise CanaryError(f"the tracer gave up: {it.ledger.broken or it.context.disabled}")
    key = it.kv.k_buffer[1]
    key.view(torch.int16)[int(tokens[5]), 0, 3] ^= 1
    live = _expect(it.step, "kv-changed", int(tokens[5]) // PAGE_SIZE, 1)
    it.free(tokens)
    key[int(tokens[7])] = 1.0
    freed = _expect(lambda: it.come("heir"), "write-after-free", int(tokens[7]) // PAGE_SIZE, 1)
    return f"found {live} and {freed}; dumps read back"


def _expect(act: Any, kind: str, page: int, layer: int) -> str:
    """``act`` must be stopped by a finding of this kind, about this page and layer."""
    record = found(act, f"corrupted KV ({kind})")
    told = (record.finding.kind, record.events[-1].pages[0], record.finding.location.layer)
    if told != (kind, page, layer):
        raise CanaryError(f"the finding is about {told}, not {(kind, page, layer)}")
    return f"{kind} in page {page}, layer {layer}"


class _Server:
    """The tracer, and stand-ins for the parts of a server that it needs."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        settings = Settings(trace=("kv-integrity",), debug_dir=folder)
        self.context = Context.alone("kv-integrity", settings, ledger=True)
        self.tracer = KvIntegrityTracer(self.context)
        self.recorder, self.ledger = self.context.recorder, self.tracer.ledger
        self.hooks = LedgerHooks(self.ledger)
        self.ledger.listen(self.tracer.listen)
        dtype = torch.bfloat16
        self.kv = SimpleNamespace(
            dtype=dtype,
            start_layer=0,
            k_buffer=[
                torch.zeros(PAGES * PAGE_SIZE, HEADS, DIM, dtype=dtype, device=device)
                for _ in range(LAYERS)
            ],
        )
        self.kv.v_buffer = [torch.zeros_like(k) for k in self.kv.k_buffer]
        self.pool = allocator(device, get_kvcache=lambda: self.kv)
        self.hooks.attach(self.pool)
        self.tracer.watch(self.pool, "full", self.kv)
        self.requests: list[Any] = []

    def alloc(self, rid: str, pages: int) -> torch.Tensor:
        """A request gets whole pages of KV, as from ``alloc_extend``, and the hooks are called."""
        self.recorder.step += 1
        length = pages * PAGE_SIZE
        self.requests = [SimpleNamespace(rid=rid, kv_committed_len=length)]
        self.ledger.batch = self.ledger.allocating = SimpleNamespace(reqs=self.requests)
        tokens = take(self.pool, pages)
        none, lengths = torch.tensor([0]), torch.tensor([length])
        arguments = (self.pool, none, none, lengths, lengths, none, length)
        self.hooks.allocs.after_extend(tokens, *arguments)
        self.tracer.after_extend(tokens, *arguments)
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer[tokens] = torch.randn(length, HEADS, DIM).to(buffer)
        return tokens

    def come(self, rid: str) -> None:
        """Allocate two pages, and wait for the tracer's findings."""
        self.alloc(rid, 2)
        self.ledger.settle(wait=True)

    def free(self, tokens: torch.Tensor) -> None:
        """Free tokens as SGLang does, with the hooks, and wait for the tracer's findings."""
        free(self.hooks, self.pool, tokens)
        self.tracer.after_free(None, self.pool, tokens)
        self.ledger.settle(wait=True)

    def step(self) -> None:
        """Run a step in which nothing changes, and wait for the tracer's findings."""
        self.recorder.step += 1
        self.ledger.settle(wait=True)
        self.tracer.after_run_batch(None, None, SimpleNamespace(reqs=self.requests))
        self.ledger.settle(wait=True)
