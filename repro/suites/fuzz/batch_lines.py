"""When SGLang last began a batch, by its own log.

It asks no part of g4debug, so that what g4debug says of a stand-still can be held against it. The
log must have a line for each batch: ``log_level`` info and ``decode_log_interval`` 1.
"""

from __future__ import annotations

import time
from pathlib import Path

BATCHES = (b"Prefill batch", b"Decode batch")
TOLD = b"g4debug: flight-recorder: "  # how its headlines begin


class BatchLines:
    """began: when a batch was last seen to begin, on the monotonic clock. told: how many seconds
    later the flight recorder spoke, None if it has not since.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = log.stat().st_size if log.is_file() else 0
        self.began = time.monotonic()
        self.told: float | None = None

    def look(self) -> None:
        """Read what came since the last look."""
        with self._log.open("rb") as source:
            source.seek(self._read)
            whole, end, _ = source.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        now = time.monotonic()
        for line in whole.splitlines():
            if any(batch in line for batch in BATCHES):
                self.began, self.told = now, None
            elif TOLD in line and self.told is None:
                self.told = now - self.began
