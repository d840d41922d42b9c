"""Proves that the rank-divergence tracer works: two ranks of an invented server, in one process.

The tracer, the shared memory, the check, the trap and the dump are the real ones. The schedulers
and their batches are stand-ins.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.findings.launch_memory import LaunchMemory
from g4debug.findings.peer_ranks import PeerRanks
from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.canary import found, sound
from g4debug.tracers.rank_divergence.tracer import RankDivergence
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap


class Rank:
    """One rank. ``step(n, rids)``: it is about to run step n with these requests."""

    def __init__(self, tp: int, memory: LaunchMemory, settings: Settings) -> None:
        self.recorder = Recorder(settings.steps)
        trap = Trap(settings, Describer(self.recorder))
        trap.others.memory = memory
        context = Context("rank-divergence", Hooks(), settings, self.recorder, trap)
        self.tracer = RankDivergence(context)
        self.scheduler: Any = SimpleNamespace(
            tp_rank=tp,
            dp_rank=0,
            pp_rank=0,
            server_args=SimpleNamespace(tp_size=2, dp_size=1, nnodes=1),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32)),
        )
        self.recorder.attach(self.scheduler)
        self.tracer.after_init(None, self.scheduler)

    def step(self, number: int, rids: tuple[str, ...], seq_lens: tuple[int, ...] = ()) -> None:
        lengths = seq_lens or tuple(7 + number for _ in rids)
        batch = SimpleNamespace(
            reqs=[
                SimpleNamespace(rid=rid, output_ids=[1, 2], req_pool_idx=row, kv_committed_len=4)
                for row, rid in enumerate(rids)
            ],
            forward_mode=SimpleNamespace(name="DECODE", is_extend=lambda: False),
            seq_lens_cpu=torch.tensor(lengths),
            spec_info=None,
            out_cache_loc=torch.arange(len(rids)),
        )
        self.recorder.step = number - 1
        self.recorder.begin_step(batch)
        self.tracer.before_step(self.scheduler, batch)


def pair(settings: Settings) -> tuple[Rank, Rank, PeerRanks]:
    """Two ranks that share a memory. Whoever is done closes it: ``others.close()``."""
    others = PeerRanks()
    others.make("canary")
    assert others.memory is not None
    others.memory.take()
    second = LaunchMemory(os.dup(others.memory.fd))
    second.mine = 1
    second.claim()
    return Rank(0, others.memory, settings), Rank(1, second, settings), others


def fire(folder: Path, device: torch.device) -> str:
    """Let one rank have its requests in another order; expect a finding and a dump in ``folder``.

    Returns what was seen.
    """
    first, second, others = pair(Settings(debug=True, debug_dir=folder))
    try:
        with sound("a step that is the same on both ranks"):
            for number in (1, 2, 3):
                first.step(number, ("a", "b"))
                second.step(number, ("a", "b"))
        first.step(4, ("a", "b"))
        finding = found(lambda: second.step(4, ("b", "a")), "a rank with another order").finding
        if "another order" not in finding.cause:
            raise CanaryError(f"the cause is {finding.cause!r}")
        return "found the rank with another order of requests; dump read back"
    finally:
        others.close()
