"""How long a step of a certain size takes on this server, so that a step that hangs is told from a
long one.

A prefill of 100,000 tokens, a model that lies in host memory, a kernel under a debugger: each may
take longer than ``G4DEBUG_HANG_SECONDS`` on a healthy server. So a step is compared with the last
ones of its own size. As long as there are none, nothing is known.
"""

from __future__ import annotations

from collections import deque
from typing import Any

KEPT = 16  # rounds that are kept of each size
KNOWN = 3  # of so many rounds the pace of a size is known
TIMES = 10  # a step that takes so many times as long as the longest one of its size is not usual
# Powers of two: the new tokens of a step, and all tokens of its requests. Of a step that decodes:
# its requests, and 0. To read all of a KV pool takes less than a second, so their lengths matter
# little there, and with overlap scheduling the host does not know them.
Size = tuple[int, int]
UNKNOWN: Size = (-1, -1)  # of a step that does not tell how large it is; its pace is never known


class Pace:
    def __init__(self) -> None:
        self._rounds: dict[Size, deque[float]] = {}
        # Of the step that this round has launched, and of that of the round before. With overlap
        # scheduling a round waits for the step of the round before.
        self._now: Size | None = None
        self._before: Size | None = None

    def begins(self, batch: Any) -> None:
        """A step of requests begins. batch: SGLang's ``ScheduleBatch``."""
        self._now = _size(batch)

    def came_round(self, seconds: float) -> None:
        """A round of the event loop is over, and took so many seconds."""
        if self._now is not None or self._before is not None:
            for size in {self._now, self._before}:
                if size is not None and size != UNKNOWN:
                    self._rounds.setdefault(size, deque(maxlen=KEPT)).append(seconds)
        self._before, self._now = self._now, None

    def limit(self) -> float | None:
        """Seconds after which this round is longer than any usual one. None: that is not known.

        Called in another thread, while the event loop stands.
        """
        sizes = [size for size in (self._now, self._before) if size is not None]
        rounds = [list(self._rounds.get(size, ())) for size in sizes]
        if not rounds or any(len(each) < KNOWN for each in rounds):
            return None
        return TIMES * max(max(each) for each in rounds)


def _size(batch: Any) -> Size:
    mode, requests = getattr(batch, "forward_mode", None), getattr(batch, "reqs", None)
    if mode is None or requests is None:
        return UNKNOWN
    if mode.is_decode():
        return len(requests).bit_length(), 0
    lengths, new = getattr(batch, "seq_lens_cpu", None), getattr(batch, "extend_num_tokens", None)
    if lengths is None or not isinstance(new, int):
        return UNKNOWN
    return new.bit_length(), int(lengths.sum()).bit_length()
