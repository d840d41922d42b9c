"""Knows the last step that the device has certainly finished, without asking the device.

SGLang launches a step and goes on. When it processes the step's result, it waits for the step's
tokens. So a step is known to be finished when its result has been processed, and what the checks of
that step left in host memory is complete then.

With speculative decoding the draft may still compute its next guesses behind those tokens. Then
only the step before is certain, because a stream runs one thing after the other. With overlap
scheduling it is not so: SGLang copies the tokens to the host behind all of the step, the draft
included, and waits for that copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from g4debug.findings.steps import Recorder
from g4debug.hooking.resolved import server_argument

REMEMBERED = 64  # results that are on their way; SGLang has two at most with overlap scheduling


class Waited:
    """Which steps are finished. replays: how many of the finished ones were CUDA-graph replays."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.replays = 0
        self._asked: Any = None  # the scheduler that _algorithm is of
        self._algorithm: str | None = None
        self._processed = 0  # the last step whose result was processed
        self._finished = 0  # the last one that is certainly finished
        # The results that are on their way, each with its step. Weak: they hold device memory.
        self._running: deque[tuple[weakref.ref[Any], int]] = deque(maxlen=REMEMBERED)

    def launched(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """``run_batch`` returned this result. SGLang passes the same object on."""
        if result is not None:
            self._running.append((weakref.ref(result), self.recorder.step))
        return result

    def processed(
        self, returned: Any, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """``process_batch_result(scheduler, batch, result)`` returned."""
        step = 0
        for seen, step_of_it in self._running:
            if seen() is result:
                step = step_of_it
                break
        mode = batch.forward_mode
        # An idle batch has no tokens to wait for.
        if step > self._processed and (mode.is_decode() or mode.is_extend()):
            whole = not self._speculates() or self._copied(result)
            self._finished, self._processed = step if whole else self._processed, step
            while self._running and self._running[0][1] <= step:
                self._running.popleft()
            self.replays += bool(getattr(result, "can_run_cuda_graph", False))
        return returned

    @property
    def last(self) -> int:
        """The last step that is certainly finished. 0 if there is none."""
        return self._finished

    def _copied(self, result: Any) -> bool:
        """True if the result was copied behind all of its step."""
        overlaps = getattr(self.recorder.scheduler, "enable_overlap", False)
        return bool(overlaps) and getattr(result, "copy_done", None) is not None

    def _speculates(self) -> bool:
        scheduler = self.recorder.scheduler
        if self._asked is not scheduler:  # asked once, because this runs in every step
            args = getattr(scheduler, "server_args", None)
            self._algorithm = server_argument(args, "speculative_algorithm")
            self._asked = scheduler
        return self._algorithm is not None
