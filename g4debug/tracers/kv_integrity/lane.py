"""Where the tracer's work on the device is queued: among SGLang's forwards, in launch order.

Without overlap scheduling scheduler and forward share one stream, and work that is queued now runs
between earlier and later work. With it they have two streams: when the scheduler frees the pages of
a request that has ended, the next forward is already under way, still has that request in its
batch, and still writes a token for it. So there all work goes to the stream of the forwards:

    scheduling stream:  allocate N+1 |            free what ended in N  | allocate N+2
    forward stream:     forward N | compare | forward N+1 | stamp what was freed | compare |
                        forward N+2

Each forward is launched behind all work that was queued before its launch, and work is queued
behind all forwards that were launched before. So a stamp lies behind the last forward that may
write into a page, and in front of the first one that may write into it for somebody else.

The results go to the host without waiting. They are fetched when SGLang processes the result of the
batch before them: before its tokens are sent, and without waiting for the forward that is under
way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from g4debug.ledger.books import Pages

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger

# Queued on the device. It returns int64 words for the host, or None.
Work = Callable[[], "torch.Tensor | None"]
Enter = Callable[[Pages], None]


@dataclass
class Sent:
    """Words on their way to the host."""

    host: torch.Tensor | None
    event: Any

    def arrived(self) -> bool:
        """True if they are there."""
        return bool(self.event.query())

    def fetch(self) -> Pages:
        """The words, in the shape that they had. Waits for them."""
        self.event.synchronize()
        return np.empty(0, dtype=np.int64) if self.host is None else self.host.numpy()


Send = Callable[[Work, Sequence[torch.Tensor]], Sent]


@dataclass
class _Result:
    forward: int  # the last forward that it lies behind, by SGLang's number
    sent: Sent
    enter: Enter | None


class Lane:
    """A queue of work on the device.

    overlaps: the scheduler works on the next batch while a forward runs.
    last_forward: SGLang's number of the forward that was launched last, 0 before the first.
    send: queues work behind the forwards. None where the current stream is the right place.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.overlaps = False
        self.last_forward = 0
        self.send: Send | None = None
        self._results: deque[_Result] = deque()

    def follow(self, stream: Any) -> None:
        """From now on the forwards run on ``stream``, beside the scheduler. None: on a CPU.

        A CPU has no streams: a forward has ended when its launch returns.
        """
        self.overlaps = True
        self.send = None if stream is None else OnStream(stream)

    def queue(
        self, work: Work, enter: Enter | None = None, reads: Sequence[torch.Tensor] = ()
    ) -> None:
        """Queue ``work``, and call ``enter`` with its words as soon as they have reached the host.

        reads: tensors of the current stream that the work reads.
        """
        if self.send is not None:
            self._results.append(_Result(self.last_forward, self.send(work, reads), enter))
            return
        words = work()
        if words is not None and enter is not None:
            shape, found = tuple(words.shape), enter
            self.ledger.post(words.reshape(-1), lambda flat: found(flat.reshape(shape)))

    def settle(self, forward: int | None = None, wait: bool = False) -> None:
        """Enter the results that have arrived.

        forward: wait for the results behind this forward, or behind one before it. wait: wait for
        all results. Nothing is entered if the ledger was given up.
        """
        while self._results:
            first = self._results[0]
            due = wait or (forward is not None and first.forward <= forward)
            if not due and not first.sent.arrived():
                return
            self._results.popleft()
            words = first.sent.fetch()
            # All that the ledger was told before this work was queued is there by now, too.
            self.ledger.settle()
            if first.enter is not None and words.size and not self.ledger.broken:
                first.enter(words)


class OnStream:
    """Queues work on a CUDA stream, behind all work that the current stream has so far."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __call__(self, work: Work, reads: Sequence[torch.Tensor]) -> Sent:
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for tensor in reads:
                tensor.record_stream(stream)
            words = work()
            host = None
            if words is not None:
                host = torch.empty(words.shape, dtype=torch.int64, pin_memory=True)
                host.copy_(words, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Sent(host, event)
