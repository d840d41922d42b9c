"""Proves that kv-writes works: it must catch three faults in a small, invented forward.

One writes behind the end of the pool, one writes two tokens to one place, and one writes over the
KV of another request. The tracer, its kernels, the trap, the faults and the dump are the real ones.
Only the backend, the pool and the batch are stand-ins. No SGLang is needed, and no server is
touched.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.faults import locations, write_foreign, write_out_of_range, write_twice
from g4debug.faults.base import Injection
from g4debug.sanitizer.canary import caught
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.kv_writes.tracer import WRITES, KvWritesTracer

FAULTS = (
    (write_out_of_range, "out-of-range"),
    (write_twice, "written-twice"),
    (write_foreign, "mismatch"),  # only a ledger knows the owner of the page
)
PAGE_SIZE, COLUMNS, DRAFTS = 64, 8, 4
LENGTHS = (130, 1, 400)
SLOTS = (len(LENGTHS) * COLUMNS + 1) * PAGE_SIZE


def fire(folder: Path, device: torch.device) -> str:
    """Fire the faults, expect the findings and dumps in ``folder``. Returns what was seen."""
    tracer = KvWritesTracer(Context.alone("kv-writes", Settings(debug=True, debug_dir=folder)))
    seen = []
    for fault, kind in FAULTS:
        it, wrong = _Server(tracer, device), -1

        def spoil(injection: Injection, it: _Server = it, fault: Any = fault) -> None:
            nonlocal wrong
            injection.fire(mode="target_verify")
            index, wrong, what = fault.spoil(it.forward(), injection)
            it.batch.out_cache_loc[index] = wrong
            injection.log(what)

        finding = caught(tracer, it.write, spoil, fault.FAULT, kind).finding
        if f"slot {wrong}" not in finding.headline:
            raise CanaryError(f"another location than the bad one was found: {finding.headline}")
        seen.append(f"{finding.kind} at slot {wrong}")
    return f"found {', '.join(seen)}; dumps read back"


class _Server:
    """A verify of three requests, with all tokens where their rows say."""

    def __init__(self, tracer: KvWritesTracer, device: torch.device) -> None:
        self.tracer = tracer
        rows = len(LENGTHS)
        table = torch.zeros(rows + 1, COLUMNS * PAGE_SIZE, dtype=torch.int32)
        table[1:] = torch.arange(PAGE_SIZE, SLOTS, dtype=torch.int32).view(rows, -1)
        places = [(r + 1, n + j) for r, n in enumerate(LENGTHS) for j in range(DRAFTS)]
        loc = torch.tensor([int(table[place]) for place in places], device=device)
        self.pool: Any = type(next(iter(WRITES)), (), {})()
        self.pool.size, self.pool.page_size = SLOTS - PAGE_SIZE, PAGE_SIZE
        self.table = table.to(device)
        self.backend = SimpleNamespace(req_to_token=self.table, token_to_kv_pool=self.pool)
        self.layer = SimpleNamespace(layer_id=0)
        self.batch = SimpleNamespace(
            forward_mode=SimpleNamespace(
                name="TARGET_VERIFY", is_decode=lambda: False, is_target_verify=lambda: True
            ),
            batch_size=rows,
            spec_info=SimpleNamespace(draft_token_num=DRAFTS),
            req_pool_indices=torch.arange(1, rows + 1, device=device),
            seq_lens=torch.tensor(LENGTHS, device=device),
            out_cache_loc=loc,
        )
        tracer.after_backend_init(None, self.backend, _RUNNER)
        tracer.before_run_batch()

    def forward(self) -> locations.Forward:
        """The forward, as the faults take it."""
        tokens = [
            locations.Token(i, i // DRAFTS, LENGTHS[i // DRAFTS] + i % DRAFTS, i // DRAFTS + 1, 0)
            for i in range(len(LENGTHS) * DRAFTS)
        ]
        return locations.Forward(tokens, self.batch.out_cache_loc, self.table, PAGE_SIZE, SLOTS)

    def write(self) -> None:
        """One layer writes."""

        def attention(backend: Any, *args: Any) -> None:
            safe = self.tracer.checked(self.batch.out_cache_loc, self.pool)
            inside = (safe >= 0) & (safe < SLOTS)
            if not bool(inside.all()):
                raise CanaryError("a location that the pool does not have was let through")

        given = (None, "K", "V", self.layer, self.batch)  # a layer that has KV of its own
        self.tracer.around_attention(attention, self.backend, *given)


# What the tracer reads of a ModelRunner.
_RUNNER = SimpleNamespace(
    server_args=SimpleNamespace(disable_overlap_schedule=True), page_size=PAGE_SIZE
)
