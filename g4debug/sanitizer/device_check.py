"""What the tracers with a kernel and a trap buffer share: when they look, and at which launch.

A check is launched at most once for each forward and key (a backend and a pool). In a CUDA graph
each captured launch has a slot of the trap buffer for itself; outside of one, the launches of a key
follow each other in the same slot. After each step, and before its tokens leave, the host looks at
what the kernel has left in pinned memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import torch

from g4debug.sanitizer.forward_snapshots import IN_FLIGHT, shared
from g4debug.sanitizer.trap_account import Account
from g4debug.sanitizer.trap_buffer import Left, TrapBuffer
from g4debug.tracers.base import Context


class Checked(Protocol):
    """A launch of a check."""

    slot: int
    captured: bool


L = TypeVar("L", bound=Checked)


class TrapTracer(ABC, Generic[L]):
    """A tracer whose launches are ``L``. bad: what its kernel counts, in the plural."""

    def __init__(self, context: Context, bad: str) -> None:
        self.context = context
        self.contain = context.settings.mode != "log"
        # In raise mode a finding ends the step. What is not confirmed must not change an answer.
        self.repair = context.settings.mode == "contain"
        self.trap: TrapBuffer | None = None
        self.launches: dict[int, L] = {}  # by slot of the trap buffer
        self.account = Account(context, bad)
        self.in_flight = shared(context.recorder)
        # By slot and step: a slot's next launch may be made before this one's findings are read.
        self._eager: dict[tuple[int, int], L] = {}
        self._eager_slots: dict[tuple[int, str], int] = {}

    def follow(self) -> None:
        """Put hooks at the sites at which a step begins and ends."""
        self.context.before("scheduler.run_batch", self.before_run_batch)
        self.context.before("forward_batch.init_new", self.before_forward)
        self.context.after("scheduler.run_batch", self.after_run_batch)
        self.context.before("scheduler.process_result", self.before_process_result)
        self.context.before("scheduler.stream_output", self.before_stream_output)
        # In log mode the kernel gets what is bad, and the CUDA context may be dead by now. What was
        # seen is still in host memory.
        self.context.on_exception("scheduler.run_event_loop", self.poll)

    def slot(self, key: tuple[int, str], tensor: torch.Tensor) -> tuple[int, bool]:
        """The slot of the next launch of ``key``, and whether a CUDA graph is being captured.

        tensor: one that the launch reads.
        """
        if self.trap is None:
            self.trap = TrapBuffer(tensor.device)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.trap.new_slot(), True
        slot = self._eager_slots.setdefault(key, 0) or self.trap.new_slot()
        self._eager_slots[key] = slot
        return slot, False

    def remember(self, launch: L) -> None:
        """Keep an eager launch for as long as its forward may be in flight."""
        if launch.captured or self.in_flight.copy is None:
            return
        self._eager[launch.slot, self.in_flight.step] = self.kept(launch)
        while len(self._eager) > 4 * IN_FLIGHT:
            del self._eager[next(iter(self._eager))]

    def kept(self, launch: L) -> L:
        """What is remembered of a launch."""
        return launch

    def launch_of(self, left: Left) -> L | None:
        """The launch that left this."""
        launch = self.launches.get(left.slot)
        return self._eager.get((left.slot, left.fields["step"]), launch)

    def is_strange(self, captured: bool) -> bool:
        """True for a forward that the scheduler did not launch: nothing is copied for it."""
        by_copy = self.in_flight.copy is not None and not captured
        return by_copy and self.in_flight.step != self.context.recorder.step

    def before_run_batch(self, *args: Any, **kwargs: Any) -> None:
        self.in_flight.begin()

    def before_forward(self, *args: Any, **kwargs: Any) -> None:
        """``ForwardBatch.init_new(batch, model_runner)``, which may be given the class, too."""
        if self.in_flight.copy is None:
            return
        batch = kwargs.get("batch") or next(a for a in args if not isinstance(a, type))
        self.in_flight.forward(batch, self.context.recorder.step)

    def before_process_result(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if self.in_flight.copy is not None:
            self.in_flight.processing(batch)

    def after_run_batch(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self.in_flight.launched(scheduler)
        self.poll()
        if self.trap is not None and not self.account.lost:
            self.context.checked(1, "steps")
        return result

    def before_stream_output(self, *args: Any, **kwargs: Any) -> None:
        # SGLang has waited for the step's tokens, so what was seen in that forward is visible now.
        # In raise mode no token of a bad step leaves the process.
        self.poll()

    def poll(self) -> None:
        """Report what was seen. If that is nothing, this is one read of host memory."""
        if self.trap is not None and not self.account.lost and self.trap.tripped:
            self.report(self.trap)

    @abstractmethod
    def report(self, trap: TrapBuffer) -> None:
        """Take what is in the trap buffer, and report it."""
