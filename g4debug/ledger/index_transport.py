"""Brings token and page indices from a GPU to the host, in the order in which they were posted.

Posted indices are copied on the device at once, so SGLang may change the originals. Later all
indices that were posted until then are sent together: one copy to pinned memory, for which nobody
waits. They are entered when that copy has arrived.

Without overlap scheduling the GPU waits while the host prepares a step, and then the host waits for
the GPU. So the indices that a step allocated are gathered. They are sent and entered while the
target's forward runs (:meth:`IndexTransport.meanwhile`): that costs a server nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from g4debug.ledger import snapshot
from g4debug.ledger.books import Pages
from g4debug.ledger.shadow import Marks

if TYPE_CHECKING:
    from g4debug.findings.steps import Recorder

NOT_YET = -(1 << 62)  # the value of a word in pinned memory that the device has not written yet
STAGING = 1 << 20  # int64 words of pinned memory for indices on their way to the host


class Staging(NamedTuple):
    """int64 [STAGING] each: on the device, in pinned memory, and that again as an array."""

    device: Tensor
    pinned: Tensor
    words: Pages


@dataclass(slots=True)
class Posted:
    """Indices on their way to the host, and the function that enters them there.

    words: where they are in the staging buffers. step: the step to which the hand-out or
    free belongs, however late they arrive. arrived: the event (``torch.cuda.Event``) after which
    they are in the host's memory; indices that were sent together share it.
    """

    words: slice
    enter: Callable[[Pages], None]
    step: int
    arrived: Any = None


class IndexTransport:
    """One for each ledger.

    step: while indices are entered, the step in which they were posted; else None.
    waiting: the indices that were posted and are not entered yet, oldest first.
    gathers: True if indices that a step posts are sent while its forward runs (:meth:`meanwhile`),
        and not before. In both cases all that wait are sent together.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.step: int | None = None
        self.waiting: deque[Posted] = deque()
        self.gathers = False
        self._recorder = recorder
        self._sent = 0  # so many of those that wait are on their way
        self._buffers = Staging(torch.empty(0), torch.empty(0), np.empty(0, dtype=np.int64))
        self._used = 0  # words of the buffers that are taken
        self._stream: Any = None  # the stream of the unsent posts; None on a CPU
        self._raw = -1  # the same as CUDA's own pointer
        self._gathered = 0  # so many unsent posts were made before the forward
        self._before_forward: Any = None  # an event after which that can be read on any stream
        self._beside_forward: Any = None  # the stream on which it is read
        self._spare: list[Any] = []  # events that have happened, to be recorded again

    def post(
        self,
        indices: Tensor,
        enter: Callable[[Pages], None],
        mapping: Tensor | None,
        marks: Marks | None,
    ) -> None:
        """Call ``enter`` later with the values that these indices have now; see ``Ledger.post``."""
        count = snapshot.words(indices, mapping)
        if count > STAGING:
            self.settle(wait=True)
            enter(snapshot.read(indices, mapping, marks))
            return
        self._on_current_stream(indices)
        if not len(self._buffers.words):
            device = torch.empty(STAGING, dtype=torch.int64, device=indices.device)
            pinned = torch.empty(STAGING, dtype=torch.int64, pin_memory=indices.is_cuda)
            self._buffers = Staging(device, pinned, pinned.numpy())
        if self._used + count > STAGING:
            self.settle(wait=True)
            self._used = 0
        words = slice(self._used, self._used + count)
        self._used += count
        snapshot.take(indices, self._buffers.device[words], mapping, marks)
        self.waiting.append(Posted(words, enter, self._recorder.event_step))

    def _on_current_stream(self, indices: Tensor) -> None:
        """Post on the current stream from now on. Send indices that were posted on another."""
        device = indices.get_device()
        raw = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else -1
        if raw != self._raw:  # a tenth of the time of asking for the stream itself
            self.send()
            self._raw = raw
            self._stream = torch.cuda.current_stream(device) if device >= 0 else None

    def send(self) -> None:
        """Send all that was posted, on the stream on which it was."""
        unsent = len(self.waiting) - self._sent
        if unsent:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._send(unsent)

    def _send(self, count: int) -> None:
        """Start to copy the first ``count`` posts that were not sent yet, on the current stream."""
        sent = tuple(islice(self.waiting, self._sent, self._sent + count))
        self._sent += count
        self._gathered = 0
        words = slice(sent[0].words.start, sent[-1].words.stop)
        self._buffers.words[words] = NOT_YET
        self._buffers.pinned[words].copy_(self._buffers.device[words], non_blocking=True)
        arrived = self._event()
        for posted in sent:
            posted.arrived = arrived

    def _event(self) -> Any:
        """An event that says when all that was queued on the current stream has happened."""
        event: Any = self._spare.pop() if self._spare else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def before_forward(self) -> None:
        """The target's forward is queued next, on the current stream."""
        unsent = len(self.waiting) - self._sent
        if self.gathers and unsent:
            self._before_forward, self._gathered = self._event(), unsent

    def meanwhile(self) -> None:
        """The target's forward runs now: enter the posts made before it, without waiting for it.

        They are read on another stream, after the event of :meth:`before_forward`.
        """
        ready, self._before_forward = self._before_forward, None
        if ready is None:
            return
        if self._gathered:
            with self._beside(ready):
                self._send(self._gathered)
        self._spare.append(ready)
        self._enter_arrived(wait=True)

    def _beside(self, ready: Any) -> Any:
        """The context of another stream, on which everything before ``ready`` has happened."""
        if self._beside_forward is None:
            self._beside_forward = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._beside_forward.wait_event(ready)
        return torch.cuda.stream(self._beside_forward)

    def settle(self, wait: bool = False) -> None:
        """Enter all posts that have arrived. With ``wait``, wait for those on their way."""
        self.send()
        self._enter_arrived(wait)

    def _enter_arrived(self, wait: bool) -> None:
        while self._sent:
            arrived = self.waiting[0].arrived
            if wait:
                arrived.synchronize()
            elif not arrived.query():
                return
            if self._sent == 1 or self.waiting[1].arrived is not arrived:
                self._spare.append(arrived)
            self._enter_first()

    def _enter_first(self) -> None:
        first = self.waiting.popleft()
        self._sent -= 1
        self.step = first.step
        try:
            first.enter(self._buffers.words[first.words].copy())
        finally:
            self.step = None

    def salvage(self) -> None:
        """After an error of the device, enter the posts that it copied before it died."""
        while self._sent and not (self._buffers.words[self.waiting[0].words] == NOT_YET).any():
            self._enter_first()
        self.forget()

    def forget(self) -> None:
        """Drop everything that waits, without entering it."""
        self.waiting.clear()
        self._sent = self._gathered = 0
