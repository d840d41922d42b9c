"""rank-divergence: tensor-parallel ranks that serve the same batch do the same in every step.

Each rank's scheduler decides by itself what to run, and all of them must come to the same answer:
the collectives inside the model have no other way to fit together. If one of them decides
otherwise, the ranks hang, or add up what does not belong together, which nobody sees.

Right before a step each rank writes a digest of it into the memory that the ranks of a host share,
and compares it with the digests of others: the first rank of a batch with all others, and these
with the first. No collective is used and nobody waits, so a step may be compared by the one that
comes last, or a step later.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from g4debug.findings.launch_memory import LaunchMemory, Seat
from g4debug.hooking.hooks import Order
from g4debug.hooking.resolved import dp_attention, server_argument
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.rank_divergence import digest, ring
from g4debug.tracers.rank_divergence.check import compare
from g4debug.tracers.rank_divergence.report import describe

LOOK_EVERY = 256  # steps between two looks at who there is
SITE = "scheduler.run_batch"
MISSING = "not all ranks of this host, but those that are there"


class Peer:
    """Another rank of the same batch. next: the first step that was not compared with it yet."""

    def __init__(self, seat: Seat, ring_: memoryview) -> None:
        self.seat = seat
        self.ring = ring_
        self.next = 1


class RankDivergence:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.recorder = context.recorder
        self.mine: OrderedDict[int, bytes] = OrderedDict()  # the digests of the last steps
        self.peers: dict[int, Peer] = {}  # by the number of the seat
        self.me: Seat | None = None
        self._memory: LaunchMemory | None = None
        self._ring: memoryview | None = None
        self._expected = 0  # how many peers there are to be on this host
        self._complete = False  # they are all there
        self._look_at = 0  # the step in which to look again who there is

    def rests(self, mode: str) -> str:
        """Why there is nothing to compare."""
        return "" if self._expected else "no other rank is on this host"

    def install(self) -> None:
        self.context.status.rests = self.rests
        self.context.after("scheduler.init", self.after_init)
        # Innermost: what SGLang's own function gets, after everybody has changed it who does.
        hook = self.context.isolate(self.before_step)
        self.context.hooks.before(SITE, Order.FIX, self.context.tracer_id, hook)

    def after_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if server_argument(scheduler.server_args, "tp_size", 1) == 1:
            self.context.nothing("there is one rank only, so there is nothing to compare", off=True)
            return result
        why = self._why_not(scheduler)
        if why:
            self.context.off(why)
            return result
        memory = self.context.trap.others.memory
        if memory is None or memory.mine < 0:
            self.context.off("the ranks of this server share no memory")
            return result
        ranks = self.recorder.ranks
        memory.name_ranks(ranks.dp, ranks.tp, ranks.pp)
        self._memory, self._ring = memory, memory.ring(memory.mine)
        self.me = memory.seat(memory.mine)
        args_ = scheduler.server_args
        nodes = server_argument(args_, "nnodes", 1)
        if nodes > 1:
            self.context.limit("the ranks of one host only", f"the server runs on {nodes} hosts")
        if self._locations(scheduler) is None:
            self.context.limit(
                "not the KV locations themselves, but how many there are",
                "they lie in the device's memory, and asking for them would wait for it",
            )
        self._expected = max(0, server_argument(args_, "tp_size", 1) // nodes - 1)
        return result

    def _why_not(self, scheduler: Any) -> str:
        """Why the ranks of this server cannot be compared, '' if they can."""
        args = scheduler.server_args
        if dp_attention(args):
            groups = max(
                server_argument(args, "dp_size", 1), server_argument(args, "attn_dp_size", 1)
            )
            if groups >= server_argument(args, "tp_size", 1):
                return "with DP attention on all ranks each of them has a batch of its own"
            return "it was never run with DP attention"
        if server_argument(args, "disaggregation_mode", "null") != "null":
            return "it was never run with disaggregation of prefill and decode"
        if server_argument(args, "attn_cp_size", 1) > 1:
            return "it was never run with context parallelism"
        return ""

    def before_step(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Write what this rank is about to do, and compare what others have written."""
        step = self.recorder.current
        if self._ring is None or step is None or self.context.status.is_off:
            return
        said = digest.of(step, batch, self._locations(scheduler))
        self.mine[step.step] = said
        if len(self.mine) > ring.STEPS:
            self.mine.popitem(last=False)
        if not ring.write(self._ring, step.step, said):
            self.context.limit("not every step", "some are too large for the ranks' memory")
        if step.step >= self._look_at or not self._complete:
            self._look(step.step)
        for peer in self.peers.values():
            self.compare_with(peer, step.step)

    def _look(self, step: int) -> None:
        """Find the ranks to compare with: the first of this batch with all, others with it."""
        assert self._memory is not None
        assert self.me is not None
        self._look_at = step + LOOK_EVERY
        me = self.me
        same = [
            seat
            for seat in self._memory.others()
            if (seat.dp, seat.pp) == (me.dp, me.pp) and seat.tp >= 0 and seat.pid > 0
        ]
        self._complete = len(same) >= self._expected
        if self._complete:
            self.context.status.lift(MISSING, "all of them are there")
        elif step >= LOOK_EVERY:
            self.context.limit(MISSING, "of the others nothing is in the memory that ranks share")
        first = min([me.tp, *(seat.tp for seat in same)])
        for seat in same:
            known = self.peers.get(seat.number)
            if known is not None and known.seat.pid == seat.pid:
                continue
            if first in (me.tp, seat.tp):
                self.peers[seat.number] = Peer(seat, self._memory.ring(seat.number))

    def compare_with(self, peer: Peer, last: int) -> None:
        """Compare all steps up to ``last`` that the other rank has written by now."""
        for step in range(max(peer.next, last - ring.STEPS + 1), last + 1):
            found, theirs = ring.read(peer.ring, step)
            if found < step:  # not written yet, or just being written
                return
            peer.next = step + 1
            mine = self.mine.get(step)
            if found > step or mine is None:
                continue  # it is many steps ahead
            self.context.checked(1, "steps of other ranks")
            if mine != theirs:
                self.report(step, peer.seat, mine, theirs)

    def report(self, step: int, seat: Seat, mine: bytes, theirs: bytes) -> None:
        assert self.me is not None
        known = next((s for s in self.recorder.steps if s.step == step), None)
        mode = known.forward_mode if known is not None else ""
        found = compare(mine, theirs)
        finding = describe(step, self.me.name, seat, found, mode, self.me.tp)
        self.context.trap.report(finding)

    def _locations(self, scheduler: Any) -> torch.Tensor | None:
        """``req_to_token``, if it lies in host memory."""
        table = getattr(getattr(scheduler, "req_to_token_pool", None), "req_to_token", None)
        on_host = isinstance(table, torch.Tensor) and table.device.type == "cpu"
        return table if on_host else None


TRACER = Tracer(
    id="rank-divergence",
    title="the tensor-parallel ranks of a batch do the same in each step",
    install=lambda context: RankDivergence(context).install(),
    opt_in=True,
)
